"""The worker's spans (DESIGN §7), collected in memory."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.errors import InternalError, ServiceError
from tests.unit.worker.tiny_models import cached, new_request, step_of
from worker.step import StepInput, StepResult, StepTimings
from worker.tracing import StepTracer

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
PARENT_ID = 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("worker.tracing.tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def result_of(
    step: StepInput, sampled: dict[int, int], failed: dict[int, ServiceError] | None = None
) -> StepResult:
    """A step that began at second `step` and took 10 + 200 + 30 ns."""
    handles = [new.handle for new in step.new_requests] + step.cached.handles.tolist()
    return StepResult(
        step=step.step,
        handles=handles,
        num_sampled_tokens=[sampled.get(handle, 0) for handle in handles],
        sampled_token_ids=[5] * sum(sampled.values()),
        failed=failed or {},
        timings=StepTimings(
            started_unix_ns=step.step * 10**9, prepare_ns=10, forward_ns=200, sample_ns=30
        ),
    )


def named(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


def test_prefill_and_decode_are_children_of_the_request(spans: InMemorySpanExporter) -> None:
    tracer = StepTracer()
    new = new_request(1, [5] * 7, blocks=[1], scheduled=4, traceparent=TRACEPARENT)
    steps = [
        (step_of(1, [new]), {}),
        (step_of(2, again=cached((1, 4, 3))), {1: 1}),
        (step_of(3, again=cached((1, 7, 1))), {1: 1}),
        (step_of(4, again=cached((1, 8, 1))), {1: 1}),
    ]
    for step, sampled in steps:
        tracer.observe(step, result_of(step, sampled))
    assert list(named(spans)) == ["worker.prefill"]
    end = step_of(5, finished_handles=[1])
    tracer.observe(end, result_of(end, {}))

    prefill, decode = (named(spans)[name] for name in ("worker.prefill", "worker.decode"))
    for span in (prefill, decode):
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (TRACE_ID, PARENT_ID)
        assert attribute(span, "gen_ai.request.id") == "request-1"
    assert (prefill.start_time, prefill.end_time) == (10**9, 2 * 10**9 + 240)
    assert (decode.start_time, decode.end_time) == (2 * 10**9 + 240, 4 * 10**9 + 240)
    assert [attribute(prefill, f"seamline.{n}") for n in ("tokens", "steps")] == [7, 2]
    assert [attribute(decode, f"seamline.{n}") for n in ("tokens", "steps")] == [2, 2]
    assert attribute(prefill, "seamline.forward_ms") == pytest.approx(400e-6)
    assert [(e.name, e.timestamp, dict(e.attributes or {})) for e in prefill.events] == [
        ("chunk", 10**9 + 240, {"seamline.tokens": 4}),
        ("chunk", 2 * 10**9 + 240, {"seamline.tokens": 3}),
    ]


def test_an_untraced_request_makes_no_span(spans: InMemorySpanExporter) -> None:
    tracer = StepTracer()
    step = step_of(1, [new_request(1, [5], blocks=[1])])
    tracer.observe(step, result_of(step, {1: 1}))
    tracer.close()
    assert spans.get_finished_spans() == ()


def test_a_sampled_step_and_its_requests_link_to_each_other(spans: InMemorySpanExporter) -> None:
    tracer = StepTracer()
    new = [
        new_request(1, [5] * 3, blocks=[1], traceparent=TRACEPARENT),
        new_request(2, [5] * 4, blocks=[2]),
    ]
    step = step_of(1, new, trace_step=True)
    tracer.observe(step, result_of(step, {1: 1, 2: 1}))
    prefill, step_span = (named(spans)[name] for name in ("worker.prefill", "worker.step"))
    assert step_span.parent is None
    assert [link.context.span_id for link in step_span.links] == [PARENT_ID]
    context = step_span.get_span_context()
    assert context is not None
    assert [link.context.span_id for link in prefill.links] == [context.span_id]
    assert [attribute(step_span, f"seamline.{n}") for n in ("requests", "tokens")] == [2, 7]


def test_a_failed_request_ends_with_an_error(spans: InMemorySpanExporter) -> None:
    tracer = StepTracer()
    step = step_of(1, [new_request(1, [5], blocks=[1], traceparent=TRACEPARENT)])
    tracer.observe(step, result_of(step, {}, failed={1: InternalError("no finite scores")}))
    span = named(spans)["worker.prefill"]
    assert not span.status.is_ok
    assert span.status.description == "no finite scores"


def test_closing_makes_the_spans_that_are_open(spans: InMemorySpanExporter) -> None:
    tracer = StepTracer()
    new = new_request(1, [5] * 7, blocks=[1], scheduled=4, traceparent=TRACEPARENT)
    step = step_of(1, [new])
    tracer.observe(step, result_of(step, {}))
    tracer.close()
    assert attribute(named(spans)["worker.prefill"], "seamline.tokens") == 4
