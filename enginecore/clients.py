"""Who gets what: the engine's clients and their requests."""

import logging
from collections.abc import Iterable

from enginecore.outbox import Outbox
from enginecore.request import FinishedRequest, Request
from enginecore.scheduler_output import EngineCoreOutput
from enginecore.tracing import RequestTracer
from services.errors import ServiceError

log = logging.getLogger(__name__)

_TRACE_ID = slice(3, 35)
"""Where a W3C traceparent has the trace's id."""


def trace_id_of(request: Request) -> str | None:
    """The request's trace, as 32 hexadecimal digits."""
    return request.traceparent[_TRACE_ID] if request.traceparent else None


class Clients:
    """The open outboxes, and which request belongs to which."""

    def __init__(self, tracer: RequestTracer) -> None:
        self._tracer = tracer
        self._outboxes: set[Outbox] = set()
        self._owners: dict[int, tuple[Outbox, int]] = {}

    def open(self, hold_prompt_logprobs: bool = False) -> Outbox:
        """A new client; the argument is the Outbox's."""
        outbox = Outbox(hold_prompt_logprobs)
        self._outboxes.add(outbox)
        return outbox

    def add(self, outbox: Outbox, client_handle: int, request: Request) -> None:
        """A client's request, which gets its final answer through `publish`."""
        outbox.handles[client_handle] = request.handle
        self._owners[request.handle] = (outbox, client_handle)

    def close(self, outbox: Outbox) -> list[int]:
        """Forgets a client; returns the engine's handles of its live requests."""
        self._outboxes.discard(outbox)
        outbox.close()
        return list(outbox.handles.values())

    def close_all(self, error: ServiceError) -> None:
        """Ends all clients' streams."""
        for outbox in self._outboxes:
            outbox.close(error)

    def publish(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Gives each client its outputs."""
        traces = self._tracer.has_live
        for output in outputs:
            request = output.request
            if traces and output.new_token_ids:
                self._tracer.on_tokens(request)
            owner = self._owners.get(request.handle)
            if output.finished is not None:
                self._owners.pop(request.handle, None)
                self._tracer.on_finished(output.finished)
                _log_finished(output.finished)
            if owner is not None:
                owner[0].put(owner[1], output)


def _log_finished(finished: FinishedRequest) -> None:
    request = finished.request
    log.info(
        "request finished",
        extra={
            "request_id": request.request_id,
            "trace_id": trace_id_of(request),
            "finish_reason": finished.finish_reason.value,
            "error": finished.error.code.value if finished.error is not None else None,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_cached_tokens": request.num_cached_tokens,
            "num_output_tokens": request.num_output_tokens,
            "num_preemptions": request.num_preemptions,
        },
    )
