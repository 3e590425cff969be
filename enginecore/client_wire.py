"""engine.v1 ↔ the engine's types."""

import secrets
from collections.abc import Mapping
from typing import Final

from enginecore import wire
from enginecore.engine import Engine
from enginecore.engine_state import EngineFacts, EngineState
from enginecore.request import FinishedRequest, FinishReason, Request, StopRules
from enginecore.scheduler_output import EngineCoreOutput
from enginecore.stats import SchedulerStats
from enginecore.tracing import Attributes
from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.engine.v1 import engine_pb2
from services import request_errors

_FINISH_REASONS: Final = {
    FinishReason.STOP: output_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: output_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: output_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: output_pb2.FINISH_REASON_ERROR,
}
_STATES: Final = {
    EngineState.STARTING: engine_pb2.ENGINE_STATE_STARTING,
    EngineState.READY: engine_pb2.ENGINE_STATE_READY,
    EngineState.RECOVERING: engine_pb2.ENGINE_STATE_RECOVERING,
    EngineState.DRAINING: engine_pb2.ENGINE_STATE_DRAINING,
    EngineState.FAILED: engine_pb2.ENGINE_STATE_FAILED,
}
_SEED_BITS: Final = 63
_NS_PER_MS: Final = 1_000_000


def request_from_proto(
    message: engine_pb2.EngineCoreRequest,
    facts: EngineFacts,
    handle: int,
    now_ns: int,
    call_deadline_ns: int | None = None,
) -> Request:
    """A request that was checked. Draws its seed if it has none: from then on its tokens are set.

    Args:
        message: what the client sent; its sampling params go on to the workers.
        facts: the model's end-of-sequence tokens.
        handle: the engine's handle.
        now_ns: the time of receipt.
        call_deadline_ns: the call's own deadline; the earlier of both counts.
    """
    params = message.sampling_params
    if not params.HasField("seed"):
        params.seed = secrets.randbits(_SEED_BITS)
    deadlines = [call_deadline_ns] if call_deadline_ns is not None else []
    if message.HasField("timeout_ms"):
        deadlines.append(now_ns + message.timeout_ms * _NS_PER_MS)
    return Request(
        message.request_id,
        handle,
        list(message.prompt_token_ids),
        _stop_rules(params, facts),
        sampling_params=params,
        output_token_ids=list(message.output_token_ids),
        priority=message.priority,
        arrival_ns=now_ns,
        deadline_ns=min(deadlines, default=None),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        skip_reading_prefix_cache=params.HasField("prompt_logprobs"),
        traceparent=message.traceparent or None,
    )


def receive_request(
    engine: Engine,
    message: engine_pb2.EngineCoreRequest,
    facts: EngineFacts,
    call_deadline_ns: int | None = None,
) -> Request:
    """A request at the moment of its receipt, with its span begun."""
    request = request_from_proto(
        message, facts, engine.next_handle(), engine.clock.now_ns(), call_deadline_ns
    )
    attributes = trace_attributes(message.sampling_params)
    engine.tracer.begin(request, message.tracestate or None, attributes)
    return request


def _stop_rules(params: sampling_pb2.SamplingParams, facts: EngineFacts) -> StopRules:
    return StopRules(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=facts.model.eos_token_ids,
        ignore_eos=params.ignore_eos,
    )


def trace_attributes(params: sampling_pb2.SamplingParams) -> Attributes:
    """The request's span attributes, under the gen_ai names; unset parameters by their default."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.temperature": params.temperature if params.HasField("temperature") else 1.0,
        "gen_ai.request.top_p": params.top_p if params.HasField("top_p") else 1.0,
        # Each sequence of an n > 1 request is a request of its own here.
        "gen_ai.request.n": 1,
    }
    if params.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    return attributes


def generate_response(output: EngineCoreOutput) -> engine_pb2.GenerateResponse:
    """A part of a single request's output."""
    response = engine_pb2.GenerateResponse(new_token_ids=output.new_token_ids)
    if output.logprobs is not None:
        response.logprobs.CopyFrom(wire.logprobs_to_proto(output.logprobs))
    if output.prompt_logprobs is not None:
        response.prompt_logprobs.CopyFrom(wire.logprobs_to_proto(output.prompt_logprobs))
    if output.finished is not None:
        response.finished.CopyFrom(finished_to_proto(output.finished, 0))
    return response


def outputs_to_proto(
    outputs: Mapping[int, EngineCoreOutput], epoch: int, step: int
) -> engine_pb2.EngineCoreOutputs:
    """A session's news, as columns; keys are the client's handles."""
    with_tokens = {handle: out for handle, out in outputs.items() if out.new_token_ids}
    message = engine_pb2.EngineCoreOutputs(
        epoch=epoch,
        step=step,
        handles=list(with_tokens),
        num_new_tokens=[len(out.new_token_ids) for out in with_tokens.values()],
        new_token_ids=[token for out in with_tokens.values() for token in out.new_token_ids],
        finished=[
            finished_to_proto(out.finished, handle)
            for handle, out in outputs.items()
            if out.finished is not None
        ],
    )
    for handle, out in outputs.items():
        if out.logprobs is not None:
            message.logprobs.MergeFrom(wire.logprobs_to_proto(out.logprobs))
            message.logprobs_handles.extend([handle] * len(out.logprobs.num_candidates))
        if out.prompt_logprobs is not None:
            message.prompt_logprobs.MergeFrom(wire.logprobs_to_proto(out.prompt_logprobs))
            positions = len(out.prompt_logprobs.num_candidates)
            message.prompt_logprobs_handles.extend([handle] * positions)
    return message


def finished_to_proto(finished: FinishedRequest, handle: int) -> engine_pb2.FinishedRequest:
    """A final answer."""
    return engine_pb2.FinishedRequest(
        handle=handle,
        finish_reason=_FINISH_REASONS[finished.finish_reason],
        stop_token_id=finished.stop_token_id,
        error=request_errors.to_proto(finished.error) if finished.error is not None else None,
        num_freed_blocks=finished.num_freed_blocks,
        stats=_request_stats(finished.request),
    )


def _request_stats(request: Request) -> engine_pb2.RequestStats:
    return engine_pb2.RequestStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        queued_unix_ns=request.arrival_ns,
        scheduled_unix_ns=request.scheduled_ns,
        first_token_unix_ns=request.first_token_ns,
        last_token_unix_ns=request.last_token_ns,
        finished_unix_ns=request.finished_ns or 0,
    )


def stats_to_proto(stats: SchedulerStats) -> engine_pb2.SchedulerStats:
    """The scheduler's state."""
    return engine_pb2.SchedulerStats(
        num_running_reqs=stats.num_running_reqs,
        num_waiting_reqs=stats.num_waiting_reqs,
        kv_cache_usage_ratio=stats.kv_cache_usage_ratio,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        num_preemptions=stats.num_preemptions,
        num_scheduled_tokens=stats.num_scheduled_tokens,
    )


def engine_info(engine: Engine) -> engine_pb2.GetEngineInfoResponse:
    """The engine's facts."""
    info = engine_pb2.GetEngineInfoResponse(
        engine_id=engine.engine_id,
        epoch=engine.epoch,
        state=_STATES[engine.state],
        status_message=engine.status_message,
        model=engine.options.model,
        load_progress_ratio=engine.load_progress_ratio,
    )
    if engine.facts is not None:
        model, cache = engine.facts.model, engine.facts.cache
        info.max_model_len = cache.max_model_len
        info.vocab_size = model.vocab_size
        info.eos_token_ids.extend(sorted(model.eos_token_ids))
        info.block_size = cache.block_size
        info.num_blocks = cache.num_blocks - 1
        info.dtype = model.dtype
        info.max_num_seqs = engine.options.scheduler.max_num_seqs
        info.max_num_batched_tokens = engine.options.scheduler.max_num_batched_tokens
    return info
