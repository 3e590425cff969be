"""Messages ↔ the worker's types."""

import pytest

from seamline.common.v1 import sampling_pb2
from seamline.worker.v1 import worker_pb2
from services.errors import InvalidArgumentError
from worker.sampling_params import SamplingParams
from worker.wire import grammar_from_proto, sampling_from_proto


def test_unset_sampling_fields_get_their_defaults() -> None:
    assert sampling_from_proto(sampling_pb2.SamplingParams()) == SamplingParams()


def test_zero_is_not_unset() -> None:
    message = sampling_pb2.SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0, top_k=0)
    assert sampling_from_proto(message) == SamplingParams(
        temperature=0.0, logprobs=0, prompt_logprobs=0
    )


def test_every_sampling_field_arrives() -> None:
    message = sampling_pb2.SamplingParams(
        min_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={4: -2.0},
        allowed_token_ids=[4, 5],
        bad_words=[sampling_pb2.TokenSequence(token_ids=[1, 2])],
        stop_token_ids=[8],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
    )
    assert sampling_from_proto(message) == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={4: -2.0},
        allowed_token_ids=(4, 5),
        bad_words=((1, 2),),
        stop_token_ids=(8,),
        ignore_eos=True,
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=1,
    )


def test_a_bitmask_is_rows_of_little_endian_words() -> None:
    words = [0b101, 1 << 31, 0, 1]
    bitmask = b"".join(word.to_bytes(4, "little") for word in words)
    mask = grammar_from_proto(worker_pb2.GrammarOutput(handles=[4, 9], bitmask=bitmask))
    assert mask.handles == [4, 9]
    allowed = [[t for t in range(64) if row[t // 8] >> t % 8 & 1] for row in mask.bits.tolist()]
    assert allowed == [[0, 2, 63], [32]]


@pytest.mark.parametrize(("handles", "size"), [([], 4), ([1], 6), ([1, 2, 3], 16)])
def test_a_ragged_bitmask_is_refused(handles: list[int], size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="bitmask"):
        grammar_from_proto(worker_pb2.GrammarOutput(handles=handles, bitmask=bytes(size)))
