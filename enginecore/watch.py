"""The live requests and the scheduler as an operator sees them."""

from typing import Final

from enginecore import client_wire
from enginecore.clients import trace_id_of
from enginecore.engine import Engine
from enginecore.engine_state import EngineState
from enginecore.request import Request, RequestStatus
from enginecore.scheduler import Scheduler
from seamline.engine.v1 import engine_pb2
from services.errors import OutOfRangeError

_DEFAULT_INTERVAL_MS: Final = 1000
_MIN_INTERVAL_MS: Final = 10
_MAX_INTERVAL_MS: Final = 60_000

_STATES: Final = {
    RequestStatus.WAITING: engine_pb2.REQUEST_STATE_WAITING,
    RequestStatus.WAITING_FOR_GRAMMAR: engine_pb2.REQUEST_STATE_WAITING_FOR_GRAMMAR,
    RequestStatus.RUNNING: engine_pb2.REQUEST_STATE_RUNNING,
    RequestStatus.PREEMPTED: engine_pb2.REQUEST_STATE_PREEMPTED,
}


def interval_s(
    request: engine_pb2.WatchSchedulerRequest | engine_pb2.WatchRequestsRequest,
) -> float:
    """The time between messages in seconds. Errors: OutOfRangeError."""
    interval_ms = request.interval_ms if request.HasField("interval_ms") else _DEFAULT_INTERVAL_MS
    if not _MIN_INTERVAL_MS <= interval_ms <= _MAX_INTERVAL_MS:
        raise OutOfRangeError(
            f"interval_ms must be {_MIN_INTERVAL_MS} to {_MAX_INTERVAL_MS}", param="interval_ms"
        )
    return interval_ms / 1000


def scheduler_view(engine: Engine) -> engine_pb2.WatchSchedulerResponse:
    """The scheduler's state now; all zero before it exists."""
    response = engine_pb2.WatchSchedulerResponse(step=engine.last_step)
    if engine.scheduler is not None:
        response.stats.CopyFrom(client_wire.stats_to_proto(engine.scheduler.stats()))
    return response


def requests_view(engine: Engine) -> engine_pb2.WatchRequestsResponse:
    """The live requests, oldest first."""
    response = engine_pb2.WatchRequestsResponse(step=engine.last_step)
    scheduler = engine.scheduler
    if scheduler is not None:
        oldest_first = sorted(scheduler.requests.values(), key=lambda request: request.arrival_ns)
        response.requests.extend(_view(request, scheduler, engine) for request in oldest_first)
    return response


def _view(request: Request, scheduler: Scheduler, engine: Engine) -> engine_pb2.RequestView:
    return engine_pb2.RequestView(
        request_id=request.request_id,
        state=_STATES[request.status],
        waiting_for=_waiting_for(request, scheduler, engine),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_blocks=scheduler.num_blocks_of(request),
        last_progress_step=request.last_progress_step,
        trace_id=trace_id_of(request) or "",
    )


def _waiting_for(request: Request, scheduler: Scheduler, engine: Engine) -> str:
    if engine.state is EngineState.RECOVERING:
        return "the worker"
    if request.status is RequestStatus.RUNNING:
        return ""
    if request is scheduler.waiting.peek():
        return scheduler.blocked_on or "the next step"
    return "the requests before it"
