"""The gateway's spans, logs and trace headers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from seamline.common.v1 import output_pb2
from seamline.gateway.v1 import gateway_pb2
from tests.fakes.engine import text_script
from tests.fakes.gateway import FakeStack, running_stack, until

ROUTE = "POST /v1/chat/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    """The process's provider: it can be set once, so that an earlier test's one is taken."""
    current = trace.get_tracer_provider()
    if not isinstance(current, TracerProvider):
        current = TracerProvider()
        trace.set_tracer_provider(current)
    return current


@pytest.fixture
def exporter(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    yield exporter
    processor.shutdown()


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    async with running_stack(tmp_path) as running:
        yield running


def _spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_request_is_one_tree_in_the_clients_trace_g1(
    stack: FakeStack, exporter: InMemorySpanExporter
) -> None:
    """G1: parents, kinds, attributes; the engine gets the context of gateway.generate."""
    stack.engine.script = text_script("hello")
    stack.http.headers["traceparent"] = TRACEPARENT
    stack.http.headers["tracestate"] = "vendor=1"
    answer = await stack.chat(
        temperature=0.5, top_p=0.25, max_tokens=50, request_id="r-1", stream=True
    )
    await until(lambda: ROUTE in _spans(exporter))
    spans = _spans(exporter)
    root = spans[ROUTE]
    assert root.parent is not None
    assert format(root.context.trace_id, "032x") == TRACE_ID == answer.headers["x-trace-id"]
    assert format(root.parent.span_id, "016x") == PARENT_ID
    assert root.kind is SpanKind.SERVER
    for name in ("gateway.render", "gateway.tokenize", "gateway.generate"):
        child = spans[name]
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id, name
        assert child.start_time is not None
        assert child.end_time is not None
        assert root.end_time is not None
        assert child.start_time <= child.end_time <= root.end_time
    generate = spans["gateway.generate"]
    assert generate.kind is SpanKind.CLIENT
    sent = stack.engine.added[-1]
    assert sent.traceparent == f"00-{TRACE_ID}-{generate.context.span_id:016x}-01"
    assert sent.tracestate == "vendor=1"
    assert root.attributes is not None
    expected = {
        "gen_ai.request.id": "r-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.n": 1,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: root.attributes[name] for name in expected} == expected
    assert generate.attributes is not None
    assert generate.attributes["gen_ai.usage.completion_tokens"] == len("hello") + 1
    assert not any(span.status.status_code is StatusCode.ERROR for span in spans.values())


async def test_faults_and_refusals_have_their_status(
    stack: FakeStack, exporter: InMemorySpanExporter
) -> None:
    """A client's fault is not the server's error; a fault of the engine is."""
    await stack.chat(temperature=-1)
    refused = _spans(exporter)[ROUTE]
    assert refused.status.status_code is StatusCode.UNSET
    assert refused.attributes is not None
    assert refused.attributes["error.type"] == "INVALID_ARGUMENT"
    exporter.clear()
    stack.engine.refuse = output_pb2.RequestError(
        code=output_pb2.REQUEST_ERROR_CODE_INTERNAL, message="x"
    )
    answer = await stack.chat()
    spans = _spans(exporter)
    for name in (ROUTE, "gateway.generate"):
        assert spans[name].status.status_code is StatusCode.ERROR, name
    assert format(spans[ROUTE].context.trace_id, "032x") in answer.json()["error"]["message"]


async def test_an_aborted_request_is_traced_g1(
    stack: FakeStack, exporter: InMemorySpanExporter
) -> None:
    stack.engine.hold = True
    call = asyncio.create_task(stack.chat())
    await until(lambda: stack.engine.live)
    call.cancel()
    await until(lambda: ROUTE in _spans(exporter))
    generate = _spans(exporter)["gateway.generate"]
    assert generate.attributes is not None
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert generate.status.description == "cancelled by the client"
    await asyncio.gather(call, return_exceptions=True)


async def test_grpc_metadata_carries_the_context(
    stack: FakeStack, exporter: InMemorySpanExporter
) -> None:
    request = gateway_pb2.GenerateRequest(input=gateway_pb2.GenerateInput(text="hi"))
    await stack.stub.Generate(request, metadata=(("traceparent", TRACEPARENT),))
    name = "seamline.gateway.v1.GatewayService/Generate"
    await until(lambda: name in _spans(exporter))
    span = _spans(exporter)[name]
    assert format(span.context.trace_id, "032x") == TRACE_ID
    assert stack.engine.added[-1].traceparent.startswith(f"00-{TRACE_ID}-")


@pytest.mark.parametrize(
    ("traceparent", "tracestate"),
    [
        ("", "vendor=1"),
        ("garbage", "vendor=1"),
        (f"00-{'0' * 32}-{PARENT_ID}-01", "vendor=1"),
        ("0" * 5000, "vendor=1"),
        (TRACEPARENT, "v=" + "y" * 5000),
        (TRACEPARENT, ",".join(f"v{i}=1" for i in range(500))),
    ],
)
async def test_bad_trace_headers_never_cost_a_request_g1(
    stack: FakeStack, traceparent: str, tracestate: str
) -> None:
    """W3C: what is malformed or too long is dropped, not answered with an error."""
    headers = {"traceparent": traceparent, "tracestate": tracestate}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert stack.engine.added[-1].tracestate == ""
    request = gateway_pb2.GenerateRequest(input=gateway_pb2.GenerateInput(text="hi"))
    await stack.stub.Generate(request, metadata=tuple(headers.items()))
    assert stack.engine.added[-1].tracestate == ""


async def test_probes_are_not_traced(stack: FakeStack, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/ready", "/metrics", "/version"):
        await stack.http.get(path)
    assert _spans(exporter) == {}


async def test_one_line_per_request_and_no_prompt(
    stack: FakeStack, provider: TracerProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    messages = [{"role": "user", "content": "my-secret-prompt"}]
    stack.engine.script = text_script("my-secret-answer")
    await stack.chat(messages=messages, request_id="logged", max_tokens=50)
    await stack.chat(messages=messages, request_id="bad", temperature=-1)
    lines = [r for r in caplog.records if getattr(r, "request_id", None) == "logged"]
    assert len(lines) == 1
    record = vars(lines[0])
    assert record["levelno"] == logging.INFO
    assert len(record["trace_id"]) == 32
    assert record["completion_tokens"] == len("my-secret-answer") + 1
    assert record["finish_reasons"] == "stop"
    assert record["duration_s"] >= record["ttft_s"] > 0
    for each in caplog.records:
        assert "my-secret" not in each.getMessage() + repr(vars(each))
