from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from enginecore import tracing
from enginecore.clients import Clients
from enginecore.request import Request
from enginecore.scheduler import Scheduler
from enginecore.scheduler_output import EngineCoreOutput
from enginecore.tracing import RequestTracer
from services.errors import InternalError
from tests.unit.enginecore.builders import (
    ManualClock,
    make_request,
    make_scheduler,
    result_of,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE_ID}-b7ad6b7169203331-00"


class Run:
    """A scheduler whose steps are traced, without an engine."""

    def __init__(self, num_blocks: int = 100, **config: int) -> None:
        self.clock = ManualClock()
        self.scheduler: Scheduler = make_scheduler(
            clock=self.clock, num_blocks=num_blocks, prefix_caching=False, **config
        )
        self.tracer = RequestTracer(self.clock)
        self.clients = Clients(self.tracer)

    def add(self, request: Request) -> None:
        request.arrival_ns = self.clock.time_ns
        self.tracer.begin(request, None, {"gen_ai.request.temperature": 0.5})
        self.scheduler.add_requests([request])

    def step(self) -> None:
        self.clock.time_ns += 100
        output = self.scheduler.schedule()
        self.tracer.on_scheduled(output, self.scheduler.requests)
        self.clock.time_ns += 1000
        self.clients.publish(
            self.scheduler.update_from_output(output, result_of(self.scheduler, output))
        )


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))

    def tracer(component: str) -> Tracer:
        return provider.get_tracer(component)

    monkeypatch.setattr(tracing, "tracer", tracer)
    yield memory
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def duration(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def test_spans_of_one_request_g1(exporter: InMemorySpanExporter) -> None:
    """G1: in the caller's trace, with true counts and durations."""
    run = Run(max_num_batched_tokens=16)
    request = make_request(1, 40, max_tokens=3, traceparent=PARENT)
    run.add(request)
    assert request.traceparent is not None
    assert request.traceparent != PARENT
    assert TRACE_ID in request.traceparent
    while run.scheduler.requests:
        run.step()
    spans = by_name(exporter)
    assert set(spans) == {
        "enginecore.request",
        "enginecore.queue",
        "enginecore.prefill",
        "enginecore.decode",
    }
    root = spans["enginecore.request"]
    assert root.parent is not None
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert request.traceparent.split("-")[2] == f"{root.context.span_id:016x}"
    for name in ("queue", "prefill", "decode"):
        part = spans[f"enginecore.{name}"]
        assert part.parent is not None
        assert part.parent.span_id == root.context.span_id
    assert duration(spans["enginecore.queue"]) == 100
    assert duration(spans["enginecore.prefill"]) == 3 * 1000 + 2 * 100
    assert duration(spans["enginecore.decode"]) == 2 * 1100
    chunks = [dict(event.attributes or {}) for event in spans["enginecore.prefill"].events]
    assert chunks == [
        {"step": 1, "num_tokens": 16},
        {"step": 2, "num_tokens": 16},
        {"step": 3, "num_tokens": 8},
    ]
    assert spans["enginecore.decode"].events == ()
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.request.id"] == "request-1"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.prompt_tokens"] == 40
    assert attributes["gen_ai.usage.completion_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(100e-9)
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(3300e-9)
    assert attributes["gen_ai.latency.time_in_model_prefill"] == pytest.approx(3200e-9)
    assert attributes["gen_ai.latency.time_in_model_decode"] == pytest.approx(2200e-9)
    assert attributes["gen_ai.latency.time_in_model_inference"] == pytest.approx(5400e-9)
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(5500e-9)


def test_preemption_and_resumption_are_events(exporter: InMemorySpanExporter) -> None:
    run = Run(num_blocks=11)
    run.add(make_request(1, 80, max_tokens=4))
    run.add(make_request(2, 79, max_tokens=4, traceparent=PARENT))
    while run.scheduler.requests:
        run.step()
    (decode,) = [
        span
        for span in exporter.get_finished_spans()
        if span.name == "enginecore.decode" and f"{span.context.trace_id:032x}" == TRACE_ID
    ]
    names = [event.name for event in decode.events]
    assert names == ["preempted", "resumed", "chunk"]


def test_aborted_and_failed_requests_have_spans_too_g1(exporter: InMemorySpanExporter) -> None:
    """G1"""
    run = Run()
    run.add(make_request(1, 10, traceparent=PARENT))
    finished = run.scheduler.abort(1)
    assert finished is not None
    run.clients.publish([EngineCoreOutput(finished.request, finished=finished)])
    (root,) = exporter.get_finished_spans()
    assert root.attributes is not None
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    exporter.clear()
    run.add(make_request(2, 10, traceparent=PARENT))
    run.step()
    finished = run.scheduler.fail(2, InternalError("boom"))
    assert finished is not None
    run.clients.publish([EngineCoreOutput(finished.request, finished=finished)])
    root = by_name(exporter)["enginecore.request"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes is not None
    assert root.attributes["error.type"] == "INTERNAL"


def test_unsampled_request_leaves_nothing_and_keeps_its_trace(
    exporter: InMemorySpanExporter,
) -> None:
    run = Run()
    request = make_request(1, 10, max_tokens=2, traceparent=UNSAMPLED)
    run.add(request)
    assert not run.tracer.has_live
    assert request.traceparent is not None
    assert request.traceparent.startswith(f"00-{TRACE_ID}-")
    while run.scheduler.requests:
        run.step()
    assert exporter.get_finished_spans() == ()
