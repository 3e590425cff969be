"""Bad input, refusals and faults: each has its answer, and the gateway serves on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from gateway.app import create_app
from gateway.auth import PROBE_PATHS, ApiKeys
from seamline.common.v1 import output_pb2
from seamline.engine.v1 import engine_pb2
from tests.fakes.engine import text_script
from tests.fakes.gateway import MODEL, FakeStack, running_stack, until

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    async with running_stack(tmp_path, max_request_bytes=64 * 1024) as running:
        yield running


def _assert_shape(body: dict[str, Any]) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


async def _assert_serves(stack: FakeStack) -> None:
    assert (await stack.chat(max_tokens=1)).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    """Lists in lists in an object; a JSON parser takes about a thousand."""
    value: Any = "<|im_start|>"
    for _ in range(depth):
        value = [value]
    return {"deep": value}


CHAT_FAULTS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": [1]}, 400, "messages[0]"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "root", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        400,
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        501,
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, 501, "messages[0]"),
    ({"model": 5}, 400, "model"),
    ({"model": "other"}, 404, "model"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 2.5}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"top_k": 1.5}, 400, "top_k"),
    ({"top_k": -2}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 10_000}, 400, "n"),
    ({"n": "2"}, 400, "n"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": -(2**63) - 1}, 400, "seed"),
    ({"seed": 2**80}, 400, "seed"),
    ({"seed": 1.5}, 400, "seed"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 10**12}, 400, "max_tokens"),
    ({"max_tokens": 5000}, 400, "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop": [""]}, 400, "stop[0]"),
    ({"stop": [1]}, 400, "stop[0]"),
    ({"stop": 5}, 400, "stop"),
    ({"stop": "x" * 5000}, 400, "stop"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids[0]"),
    ({"stop_token_ids": [99_999]}, 400, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream": True, "stream_options": 1}, 400, "stream_options"),
    ({"priority": 2**31}, 400, "priority"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"request_id": "a b\n"}, 400, "request_id"),
    ({"chat_template_kwargs": []}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": nested(100)}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": nested(900)}, 400, "chat_template_kwargs"),
    ({"stream": False, "stream_options": {}}, 400, "stream_options"),
    ({"min_tokens": 3, "max_tokens": 2}, 400, "min_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 501, "tools"),
    ({"tool_choice": "required"}, 501, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, 501, "response_format"),
    ({"logprobs": True}, 501, "logprobs"),
    ({"top_logprobs": 3}, 501, "top_logprobs"),
    ({"structured_outputs": {"regex": "a"}}, 501, "structured_outputs"),
    ({"best_of": 2}, 501, "best_of"),
    ({"modalities": ["audio"]}, 501, "modalities"),
    ({"chat_template": "x"}, 501, "chat_template"),
]
COMPLETION_FAULTS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", ""]}, 400, "prompt"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [99_999]}, 400, "prompt"),
    ({"prompt": [2**70]}, 400, "prompt"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": ["a"] * 300}, 400, "n"),
    ({"prompt": "a" * 512}, 400, "prompt"),
    ({"prompt": "a" * 500, "max_tokens": 13}, 400, "max_tokens"),
    ({"logprobs": 0}, 501, "logprobs"),
    ({"suffix": "x"}, 501, "suffix"),
    ({"echo": "yes"}, 400, "echo"),
]


@pytest.mark.parametrize(
    ("route", "base", "faults"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, CHAT_FAULTS),
        (COMPLETIONS, {"prompt": "hi"}, COMPLETION_FAULTS),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_parameters_are_named_f10(
    stack: FakeStack, route: str, base: dict[str, Any], faults: list[Any], stream: bool
) -> None:
    """F10: status, shape and parameter; the same for streams, whose status comes first."""
    for fault, status, param in faults:
        body = {"model": MODEL, "stream": stream, **base, **fault}
        answer = await stack.http.post(route, json=body)
        assert answer.status_code == status, (fault, answer.text)
        _assert_shape(answer.json())
        assert answer.json()["error"]["param"] == param, (fault, answer.text)
    assert not stack.engine.added, "nothing bad reaches the engine"
    await _assert_serves(stack)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"", JSON, 400),
        (b"[]", JSON, 400),
        (b"null", JSON, 400),
        (b'"x"', JSON, 400),
        (b'{"temperature": NaN}', JSON, 400),
        (b'{"messages": [], "temperature": Infinity}', JSON, 400),
        (
            b'{"prompt": "a", "messages": [{"role":"user","content":"x"}], "top_p": 1e999}',
            JSON,
            400,
        ),
        (b'{"messages": "\xff"}', JSON, 400),
        (b'{"messages": "\\ud800"}', JSON, 400),
        (b"[" * 50_000, JSON, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b" " * 70_000, JSON, 413),
    ],
)
async def test_bad_bodies_f10(
    stack: FakeStack, content: bytes, headers: dict[str, str], status: int
) -> None:
    answer = await stack.http.post(CHAT, content=content, headers=headers)
    assert answer.status_code == status
    _assert_shape(answer.json())
    await _assert_serves(stack)


async def test_a_body_without_a_length_is_bounded_too(stack: FakeStack) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 1024

    answer = await stack.http.post(CHAT, content=endless(), headers=JSON)
    assert answer.status_code == 413
    await _assert_serves(stack)


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", CHAT, 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("GET", "/v1/nothing", 404, None),
        ("POST", "/", 404, None),
        ("GET", "/%00", 404, None),
    ],
)
async def test_unknown_routes(
    stack: FakeStack, method: str, path: str, status: int, allowed: str | None
) -> None:
    answer = await stack.http.request(method, path)
    assert answer.status_code == status
    assert answer.headers.get("allow") == allowed
    _assert_shape(answer.json())


async def test_a_client_chosen_request_id_is_checked(stack: FakeStack) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    kept = await stack.http.post(CHAT, json=body, headers={"x-request-id": "mine-1"})
    assert kept.headers["x-request-id"] == "mine-1"
    drawn = await stack.http.post(CHAT, json=body, headers={"x-request-id": "x" * 500})
    assert len(drawn.headers["x-request-id"]) == 32


async def test_two_live_requests_may_share_an_id(stack: FakeStack) -> None:
    stack.engine.step_s = 0.01
    answers = await asyncio.gather(*(stack.chat(request_id="same", max_tokens=5) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    ids = {request.request_id for request in stack.engine.added}
    assert len(ids) == 3
    assert "same" in ids
    await stack.chat(request_id="same", max_tokens=1)
    assert stack.engine.added[-1].request_id == "same", "free again when the first is over"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_engine_is_429(stack: FakeStack, stream: bool) -> None:
    stack.engine.refuse = output_pb2.RequestError(
        code=output_pb2.REQUEST_ERROR_CODE_RESOURCE_EXHAUSTED, message="queue full", retryable=True
    )
    answer = await stack.chat(stream=stream)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (output_pb2.REQUEST_ERROR_CODE_INVALID_ARGUMENT, 400),
        (output_pb2.REQUEST_ERROR_CODE_DEADLINE_EXCEEDED, 504),
        (output_pb2.REQUEST_ERROR_CODE_UNAVAILABLE, 503),
        (output_pb2.REQUEST_ERROR_CODE_UNIMPLEMENTED, 501),
        (output_pb2.REQUEST_ERROR_CODE_ALREADY_EXISTS, 409),
        (output_pb2.REQUEST_ERROR_CODE_INTERNAL, 500),
    ],
)
async def test_the_engines_errors_have_a_status(stack: FakeStack, code: Any, status: int) -> None:
    stack.engine.refuse = output_pb2.RequestError(code=code, message="the reason", param="top_k")
    answer = await stack.chat(stream=True)
    assert answer.status_code == status
    _assert_shape(answer.json())
    assert ("the reason" in answer.text) == (status != 500), "an internal error says nothing"


async def test_an_error_in_mid_stream_is_an_event_f10(stack: FakeStack) -> None:
    """F10: an error event, then [DONE]; nothing of the inside."""
    stack.engine.script = text_script("abcdef")
    stack.engine.fail_after = 3
    answer = await stack.chat(stream=True)
    assert answer.status_code == 200
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert '"error"' in events[-2]
    assert "secret" not in answer.text
    whole = await stack.chat()
    assert whole.status_code == 500
    assert "secret" not in whole.text


async def test_every_route_but_probes_needs_a_key_g4(tmp_path: Path) -> None:
    """G4: found by walking the route table, so that a new route cannot be forgotten."""
    async with running_stack(tmp_path, api_key=("key-1", "key-2")) as stack:
        app = create_app(stack.handle.core, ApiKeys(()))
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        assert len(routes) == len(app.routes)
        assert len(routes) >= 10
        seen_probes = set()
        for route in routes:
            path = route.path.replace("{name:path}", MODEL)
            for method in route.methods or ():
                statuses = [
                    (await stack.http.request(method, path, headers=headers)).status_code
                    for headers in (
                        {},
                        {"authorization": "Bearer wrong"},
                        {"authorization": "Bearer"},
                        {"authorization": "Basic key-1"},
                        {"authorization": "Bearer key-1x"},
                    )
                ]
                if route.path in PROBE_PATHS:
                    seen_probes.add(route.path)
                    assert 401 not in statuses, path
                    continue
                assert statuses == [401] * 5, path
                for key in ("key-1", "key-2"):
                    headers = {"authorization": f"Bearer {key}"}
                    allowed = await stack.http.request(method, path, headers=headers)
                    assert allowed.status_code != 401, path
        assert seen_probes == PROBE_PATHS
        refused = await stack.http.get("/v1/models")
        _assert_shape(refused.json())
        assert refused.headers["www-authenticate"] == "Bearer"


async def test_starting_engine_is_503_with_a_reason(tmp_path: Path) -> None:
    async with running_stack(tmp_path, wait_ready=False) as stack:
        stack.engine.state = engine_pb2.ENGINE_STATE_STARTING
        answer = await stack.chat()
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert (await stack.http.get("/health")).status_code == 200
        assert (await stack.http.head("/health")).status_code == 200
        await asyncio.sleep(0.3)
        ready = await stack.http.get("/ready")
        assert ready.status_code == 503
        assert "being a fake" in ready.text
        stack.engine.state = engine_pb2.ENGINE_STATE_READY
        await until(lambda: stack.handle.core.engine.availability.ready)
        await _assert_serves(stack)


async def test_failed_engine_is_unhealthy_g3(tmp_path: Path) -> None:
    """G3: /health is 503 exactly when the engine is dead."""
    async with running_stack(tmp_path, wait_ready=False) as stack:
        stack.engine.state = engine_pb2.ENGINE_STATE_FAILED
        await until(lambda: stack.handle.core.engine.availability.dead)
        assert (await stack.http.get("/health")).status_code == 503
