import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider

from services import telemetry

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_continues_the_callers_trace() -> None:
    tracer = TracerProvider().get_tracer("t")
    span = tracer.start_span("x", context=telemetry.context_from_headers(PARENT, "k=v"))
    header = telemetry.traceparent_of(span)
    assert header is not None
    assert header.split("-")[1] == PARENT.split("-")[1] == telemetry.trace_id_of(span)
    assert header.split("-")[2] != PARENT.split("-")[2]
    assert header.endswith("-01")
    assert span.get_span_context().trace_state.get("k") == "v"


def test_the_decision_not_to_sample_travels() -> None:
    span = TracerProvider(sampler=ALWAYS_OFF).get_tracer("t").start_span("x")
    header = telemetry.traceparent_of(span)
    assert header is not None
    assert int(header.rpartition("-")[2], 16) & 1 == 0


@pytest.mark.parametrize("header", [None, "", "nonsense", "00-zz-yy-01", PARENT[:-3], "0" * 10_000])
def test_a_malformed_header_starts_a_trace_of_its_own(header: str | None) -> None:
    span = (
        TracerProvider()
        .get_tracer("t")
        .start_span("x", context=telemetry.context_from_headers(header))
    )
    assert span.parent is None  # type: ignore[attr-defined]


def test_while_export_is_off_the_callers_context_is_passed_on() -> None:
    tracer = NoOpTracerProvider().get_tracer("t")  # what the API gives until a provider is set
    span = tracer.start_span("x", context=telemetry.context_from_headers(PARENT))
    assert telemetry.traceparent_of(span) == PARENT
