"""The gateway's spans. Parents are passed by hand: generators outlive the task that made them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)

from services.errors import ErrorCode, ServiceError
from services.telemetry import context_from_headers, trace_id_of, traceparent_of, tracer

_COMPONENT = "seamline-gateway"
_CLIENTS_FAULT = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.OUT_OF_RANGE,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.NOT_FOUND,
        ErrorCode.ALREADY_EXISTS,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.UNIMPLEMENTED,
    }
)
CANCELLED = "cancelled by the client"
MAX_TRACESTATE_CHARS = 512
"""What W3C has everybody pass on at least."""


@dataclass(slots=True, frozen=True)
class RequestTrace:
    """One request's place in its trace.

    Attributes:
        span: the SERVER span.
        tracestate: as the client sent it.
    """

    span: Span
    tracestate: str | None = None

    @property
    def trace_id(self) -> str | None:
        """32 hexadecimal digits; None when there is no trace."""
        return trace_id_of(self.span)

    @property
    def traceparent(self) -> str | None:
        """The W3C header that makes spans children of the SERVER span."""
        return traceparent_of(self.span)

    def start(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """Starts a child; whoever starts it ends it."""
        context = set_span_in_context(self.span, Context())
        return tracer(_COMPONENT).start_span(name, context=context, kind=kind)

    @contextmanager
    def child(self, name: str) -> Iterator[Span]:
        """A child for a block; an error in the block is the child's status."""
        span = self.start(name)
        try:
            yield span
        except ServiceError as error:
            mark_error(span, error)
            raise
        finally:
            span.end()


def start_request(name: str, traceparent: str | None, tracestate: str | None) -> RequestTrace:
    """Starts a SERVER span below what the client sent."""
    context = context_from_headers(traceparent, tracestate)
    span = tracer(_COMPONENT).start_span(name, context=context, kind=SpanKind.SERVER)
    return RequestTrace(span, _usable_state(context, tracestate))


def _usable_state(context: Context, tracestate: str | None) -> str | None:
    """The trace state to pass on: W3C has what is malformed or too long dropped, not refused."""
    parent = get_current_span(context).get_span_context()
    if not tracestate or len(tracestate) > MAX_TRACESTATE_CHARS or not parent.trace_state:
        return None
    return tracestate


def mark_error(span: Span, error: ServiceError) -> None:
    """Records an error; only the server's own faults make the span's status an error."""
    span.set_attribute("error.type", error.code.value)
    if error.code not in _CLIENTS_FAULT:
        span.set_status(Status(StatusCode.ERROR, error.message))


def mark_cancelled(span: Span) -> None:
    """Records that the client left before the end."""
    span.set_attribute("error.type", "CANCELLED")
    span.set_status(Status(StatusCode.ERROR, CANCELLED))
