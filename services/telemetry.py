"""OpenTelemetry: one tracer per process, W3C context in and out.

Spans are exported only when `OTEL_EXPORTER_OTLP_ENDPOINT` is set, by a background thread with a
bounded queue: a collector that is down costs dropped spans, never a request. Sampling and the rest
follow the standard `OTEL_*` variables.
"""

import logging
import os

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
EXPORT_TIMEOUT_S = 2.0
"""Unless chosen: bounds one export, and so how long a stop waits for a lost collector."""


class _OnceFilter(logging.Filter):
    """Lets a dead collector say so once, not at every batch."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line."""
        first, self._seen = not self._seen, True
        return first


def configure_telemetry(service_name: str) -> None:
    """Starts export if an endpoint is configured; called once, in `__main__`."""
    if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return
    name = os.environ.get("OTEL_SERVICE_NAME", service_name)
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    chosen = any(os.environ.get(variable) for variable in TIMEOUT_VARIABLES)
    exporter = OTLPSpanExporter(timeout=None if chosen else EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    logging.getLogger(_EXPORTER_LOGGER).addFilter(_OnceFilter())


def shutdown_telemetry() -> None:
    """Sends what is queued, for at most the exporter's timeout; does nothing if export is off."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def tracer(component: str = "seamline") -> trace.Tracer:
    """The tracer; its spans are no-ops while export is off.

    Args:
        component: the instrumentation scope. In a single process it tells the services apart.
    """
    return trace.get_tracer(component)


def context_from_headers(traceparent: str | None, tracestate: str | None = None) -> Context:
    """The parent context that a peer sent; an empty one when it sent none or a malformed one."""
    if not traceparent:
        return Context()
    carrier = {"traceparent": traceparent}
    if tracestate:
        carrier["tracestate"] = tracestate
    return _PROPAGATOR.extract(carrier, context=Context())


def traceparent_of(span: trace.Span) -> str | None:
    """The W3C header that makes a peer's spans children of `span`; None without a trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    flags = int(context.trace_flags)
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"


def trace_id_of(span: trace.Span) -> str | None:
    """The trace's id as 32 hexadecimal digits; None when there is none."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None
