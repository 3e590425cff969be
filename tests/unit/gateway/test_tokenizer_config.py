import pytest

from gateway.tokenizer import Tokenizer
from gateway.tokenizer_config import TokenizerConfig, add_named_tokens, apply_bos_eos
from tests.fakes.tokenizer import byte_backend, byte_ids

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("bos", "eos", "ids"),
    [
        (False, False, [*byte_ids("hi")]),
        (True, False, [1, *byte_ids("hi")]),
        (False, True, [*byte_ids("hi"), 2]),
        (True, True, [1, *byte_ids("hi"), 2]),
    ],
)
def test_bos_and_eos_around_a_text(bos: bool, eos: bool, ids: list[int]) -> None:
    backend = byte_backend()
    apply_bos_eos(backend, TokenizerConfig(None, SPECIAL, bos, eos))
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("hi") == ids
    assert tokenizer.encode("hi", add_special_tokens=False) == byte_ids("hi")


def test_a_named_token_becomes_special() -> None:
    backend = byte_backend()
    add_named_tokens(backend, TokenizerConfig(None, {**SPECIAL, "pad_token": "<pad>"}))
    pad = backend.token_to_id("<pad>")
    assert pad is not None
    assert Tokenizer(backend).special_ids == {0, 1, 2, pad}


def test_json_round_trip() -> None:
    config = TokenizerConfig("{{ x }}", SPECIAL, True, False)
    assert TokenizerConfig.from_json(config.to_json()) == config
