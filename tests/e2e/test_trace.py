"""One trace per request, through all layers (DESIGN §7)."""

import secrets
from itertools import pairwise

import httpx
import pytest

from bench.launched_stack import LaunchedStack
from tests.e2e.conftest import MODEL
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

ROUTE = "POST /v1/chat/completions"
PARENTS = {
    "gateway.render": ROUTE,
    "gateway.tokenize": ROUTE,
    "gateway.generate": ROUTE,
    "enginecore.request": "gateway.generate",
    "enginecore.queue": "enginecore.request",
    "enginecore.prefill": "enginecore.request",
    "enginecore.decode": "enginecore.request",
    "worker.prefill": "enginecore.request",
    "worker.decode": "enginecore.request",
}
SPAN_KIND_SERVER = 2


def ask(stack: LaunchedStack, traceparent: str, **more: object) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say something short."}],
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
    }
    headers = {"traceparent": traceparent, "x-request-id": "req-of-the-trace-test"}
    url = f"{stack.base_url}/v1/chat/completions"
    return httpx.post(url, json=body | more, headers=headers, timeout=60)


def new_traceparent() -> tuple[str, str, str]:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-01", trace_id, span_id


def by_name(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    return {span.name: span for span in spans}


def test_the_tree_reaches_the_worker(stack: LaunchedStack, receiver: OtlpReceiver) -> None:
    """G1."""
    header, trace_id, client_span = new_traceparent()
    usage = ask(stack, header).raise_for_status().json()["usage"]
    wanted = {ROUTE, *PARENTS}
    spans = by_name(receiver.wait_for(trace_id, lambda got: wanted <= {s.name for s in got}))
    assert spans[ROUTE].parent_id == client_span
    assert spans[ROUTE].kind == SPAN_KIND_SERVER
    for child, parent in PARENTS.items():
        assert spans[child].parent_id == spans[parent].span_id, child
    services = {name: span.service for name, span in spans.items()}
    assert services[ROUTE] == "seamline-gateway"
    assert services["enginecore.request"] == "seamline-enginecore"
    assert services["worker.decode"] == "seamline-worker"
    assert all(span.end_ns >= span.start_ns for span in spans.values())
    assert not any(span.is_error for span in spans.values())
    assert sorted(s.name for s in receiver.trace(trace_id)) == sorted(wanted), "and nothing else"
    attributes = spans["enginecore.request"].attributes
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.top_p"] == 0.9
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.latency.time_to_first_token"] > 0
    assert attributes["gen_ai.latency.e2e"] > 0


def test_time_flows_down_the_layers(stack: LaunchedStack, receiver: OtlpReceiver) -> None:
    header, trace_id, _ = new_traceparent()
    ask(stack, header).raise_for_status()
    wanted = {ROUTE, *PARENTS}
    spans = by_name(receiver.wait_for(trace_id, lambda got: wanted <= {s.name for s in got}))
    chain = [ROUTE, "gateway.generate", "enginecore.request", "enginecore.prefill"]
    for outer, inner in pairwise(chain):
        assert spans[outer].start_ns <= spans[inner].start_ns, inner
    assert spans["enginecore.queue"].end_ns <= spans["enginecore.prefill"].end_ns
    assert spans["enginecore.prefill"].end_ns <= spans["enginecore.decode"].end_ns
    assert spans["enginecore.decode"].end_ns <= spans[ROUTE].end_ns


def test_an_aborted_request_is_traced_too(stack: LaunchedStack, receiver: OtlpReceiver) -> None:
    header, trace_id, _ = new_traceparent()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{stack.base_url}/v1/completions",
            json={"model": MODEL, "prompt": "On and on", "max_tokens": 4000, "ignore_eos": True},
            headers={"traceparent": header},
            timeout=1.0,
        )
    spans = by_name(
        receiver.wait_for(trace_id, lambda got: "enginecore.request" in {s.name for s in got})
    )
    assert spans["enginecore.request"].attributes["gen_ai.response.finish_reasons"] == ["abort"]


def test_an_unsampled_trace_exports_nothing(stack: LaunchedStack, receiver: OtlpReceiver) -> None:
    header, trace_id, _ = new_traceparent()
    ask(stack, header[:-2] + "00").raise_for_status()
    marker, marker_id, _ = new_traceparent()
    ask(stack, marker).raise_for_status()
    receiver.wait_for(marker_id, lambda got: {"worker.decode", ROUTE} <= {s.name for s in got})
    assert receiver.trace(trace_id) == []
