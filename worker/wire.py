"""worker.v1 messages ↔ the worker's own types."""

from collections.abc import Iterable

import numpy as np

from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.worker.v1 import worker_pb2
from services import request_errors
from services.errors import InvalidArgumentError
from worker.kv_cache import KvCacheShape
from worker.sampling_params import SamplingParams
from worker.step import (
    CachedRequests,
    GrammarMask,
    HeldRequest,
    IntArray,
    LogprobColumns,
    NewRequest,
    StepInput,
    StepResult,
)
from worker.worker import LoadedModel


def step_from_proto(step: int, message: worker_pb2.SchedulerOutput, received_ns: int) -> StepInput:
    """Reads one step's work; whether columns fit together is checked where they are applied."""
    return StepInput(
        step=step,
        new_requests=[_new_request(new) for new in message.scheduled_new_reqs],
        cached=_cached_requests(message.scheduled_cached_reqs),
        finished_handles=list(message.finished_handles),
        preempted_handles=list(message.preempted_handles),
        has_grammar=message.has_structured_output_requests,
        trace_step=message.trace_step,
        received_ns=received_ns,
    )


def _ints(column: Iterable[int]) -> IntArray:
    return np.array(column, dtype=np.int64)


def _new_request(message: worker_pb2.NewRequestData) -> NewRequest:
    return NewRequest(
        handle=message.handle,
        request_id=message.request_id,
        prompt_token_ids=_ints(message.prompt_token_ids),
        output_token_ids=_ints(message.output_token_ids),
        sampling=sampling_from_proto(message.sampling_params),
        block_ids=[_ints(blocks.ids) for blocks in message.block_ids],
        num_computed_tokens=message.num_computed_tokens,
        num_scheduled_tokens=message.num_scheduled_tokens,
        resumed=message.resumed,
        traceparent=message.traceparent if message.HasField("traceparent") else None,
    )


def _cached_requests(message: worker_pb2.CachedRequestData) -> CachedRequests:
    return CachedRequests(
        handles=_ints(message.handles),
        num_computed_tokens=_ints(message.num_computed_tokens),
        num_scheduled_tokens=_ints(message.num_scheduled_tokens),
        num_new_blocks=_ints(message.num_new_blocks),
        new_block_ids=_ints(message.new_block_ids),
    )


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Reads sampling parameters; unset fields get their defaults."""
    given = message.HasField
    penalty = message.repetition_penalty if given("repetition_penalty") else 1.0
    return SamplingParams(
        temperature=message.temperature if given("temperature") else 1.0,
        top_p=message.top_p if given("top_p") else 1.0,
        top_k=message.top_k or None,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if given("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if given("prompt_logprobs") else None,
    )


def grammar_from_proto(message: worker_pb2.GrammarOutput) -> GrammarMask:
    """Reads bitmasks. Errors: InvalidArgumentError when they are not one whole row per request."""
    count = len(message.handles)
    if count == 0 and not message.bitmask:
        return GrammarMask([], np.empty((0, 0), dtype=np.uint8))
    if count == 0 or len(message.bitmask) % (4 * count):
        raise InvalidArgumentError("the bitmask is not one row of 32-bit words per request")
    # little-endian words: their bytes in order are the bits in order
    bits = np.frombuffer(message.bitmask, dtype=np.uint8).reshape(count, -1)
    return GrammarMask(list(message.handles), bits)


def shape_from_proto(message: worker_pb2.InitializeKvCacheRequest) -> KvCacheShape:
    """Reads the cache's shape."""
    return KvCacheShape(
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
    )


def result_to_proto(epoch: int, result: StepResult) -> worker_pb2.ExecuteResponse:
    """Writes one step's result."""
    output = worker_pb2.ModelRunnerOutput(
        step=result.step,
        handles=result.handles,
        num_sampled_tokens=result.num_sampled_tokens,
        sampled_token_ids=result.sampled_token_ids,
        failed_requests=[
            worker_pb2.FailedRequest(handle=handle, error=request_errors.to_proto(error))
            for handle, error in result.failed.items()
        ],
        timings=worker_pb2.StepTimings(
            started_unix_ns=result.timings.started_unix_ns,
            queue_ns=result.timings.queue_ns,
            prepare_ns=result.timings.prepare_ns,
            forward_ns=result.timings.forward_ns,
            sample_ns=result.timings.sample_ns,
        ),
    )
    if result.logprobs.handles:
        output.logprobs.CopyFrom(_logprobs(result.logprobs))
        output.logprobs_handles.extend(result.logprobs.handles)
    if result.prompt_logprobs.handles:
        output.prompt_logprobs.CopyFrom(_logprobs(result.prompt_logprobs))
        output.prompt_logprobs_handles.extend(result.prompt_logprobs.handles)
    return worker_pb2.ExecuteResponse(epoch=epoch, model_runner_output=output)


def _logprobs(columns: LogprobColumns) -> output_pb2.Logprobs:
    return output_pb2.Logprobs(
        num_candidates=columns.num_candidates,
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        ranks=columns.ranks,
    )


def model_to_proto(loaded: LoadedModel) -> worker_pb2.ModelInfo:
    """Writes what the enginecore needs to know of a model."""
    config = loaded.config
    group = worker_pb2.KvCacheGroup(
        num_layers=config.num_layers, bytes_per_token=loaded.kv_bytes_per_token
    )
    return worker_pb2.ModelInfo(
        model=loaded.spec.model,
        architecture=config.architecture,
        dtype=str(loaded.spec.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        weight_bytes=loaded.weight_bytes,
        kv_cache_groups=[group],
    )


def held_to_proto(held: HeldRequest) -> worker_pb2.HeldRequest:
    """Writes an entry of the inventory."""
    return worker_pb2.HeldRequest(
        request_id=held.request_id,
        num_computed_tokens=held.num_computed_tokens,
        block_ids=[worker_pb2.BlockIds(ids=ids) for ids in held.block_ids],
    )
