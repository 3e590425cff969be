"""Between the gateway's values and engine.v1's messages."""

from collections.abc import Iterable, Sequence

from gateway.engine_client import EngineInfo, SchedulerStats
from gateway.request import EngineRequest, Finished, FinishReason, RequestStats, SamplingParams
from seamline.common.v1 import output_pb2, sampling_pb2
from seamline.engine.v1 import engine_pb2
from services import request_errors
from services.errors import InternalError

_REASONS = {
    output_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    output_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    output_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    output_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
WIRE_REASONS = {reason: wire for wire, reason in _REASONS.items()}


def sampling_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """The wire form; `None` stays unset."""
    return sampling_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[sampling_pb2.TokenSequence(token_ids=ids) for ids in params.bad_words],
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def request_to_proto(
    request: EngineRequest, output_token_ids: Sequence[int], timeout_ms: int | None
) -> engine_pb2.EngineCoreRequest:
    """The wire form of a request, to resume after `output_token_ids`."""
    return engine_pb2.EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=output_token_ids,
        sampling_params=sampling_to_proto(request.sampling),
        priority=request.priority,
        timeout_ms=timeout_ms,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
        tracestate=request.tracestate,
    )


def add_message(
    requests: Iterable[tuple[int, engine_pb2.EngineCoreRequest]],
) -> engine_pb2.ConnectRequest:
    """The message that adds (handle, request) pairs, all or none."""
    added = [engine_pb2.SessionRequest(handle=h, request=request) for h, request in requests]
    return engine_pb2.ConnectRequest(add=engine_pb2.AddRequests(requests=added))


def abort_message(handles: Iterable[int]) -> engine_pb2.ConnectRequest:
    """The message that aborts requests."""
    return engine_pb2.ConnectRequest(abort=engine_pb2.AbortRequests(handles=handles))


def finished_from_proto(message: engine_pb2.FinishedRequest) -> Finished:
    """How a request ended."""
    reason = _REASONS.get(message.finish_reason, FinishReason.ERROR)
    error = None
    if reason is FinishReason.ERROR:
        error = (
            request_errors.from_proto(message.error)
            if message.HasField("error")
            else InternalError("the engine reported no reason")
        )
    stop = message.stop_token_id if message.HasField("stop_token_id") else None
    return Finished(reason, stop, error, _stats_from_proto(message.stats))


def _stats_from_proto(message: engine_pb2.RequestStats) -> RequestStats:
    def known(value: int) -> int | None:
        return value or None

    return RequestStats(
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_output_tokens=message.num_output_tokens,
        num_preemptions=message.num_preemptions,
        queued_unix_ns=message.queued_unix_ns,
        scheduled_unix_ns=known(message.scheduled_unix_ns),
        first_token_unix_ns=known(message.first_token_unix_ns),
        last_token_unix_ns=known(message.last_token_unix_ns),
        finished_unix_ns=message.finished_unix_ns,
    )


def scheduler_stats_from_proto(message: engine_pb2.SchedulerStats) -> SchedulerStats:
    """The engine's load."""
    return SchedulerStats(
        num_running_reqs=message.num_running_reqs,
        num_waiting_reqs=message.num_waiting_reqs,
        kv_cache_usage_ratio=message.kv_cache_usage_ratio,
        prefix_cache_queries=message.prefix_cache_queries,
        prefix_cache_hits=message.prefix_cache_hits,
        num_preemptions=message.num_preemptions,
    )


def info_from_proto(message: engine_pb2.GetEngineInfoResponse) -> EngineInfo:
    """The engine's facts."""
    return EngineInfo(
        engine_id=message.engine_id,
        model=message.model,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
    )
