"""Clients that leave and engines that go away."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.engine import text_script
from tests.fakes.gateway import MODEL, FakeStack, running_stack, until

TEXT = "the quick brown fox jumps over the lazy dog, twice: é日😀. " * 2


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    async with running_stack(tmp_path) as running:
        yield running


def _text_of(events: str) -> str:
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line).get("choices", [])]
    return "".join(choice.get("text", "") for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_c5(stack: FakeStack, stream: bool) -> None:
    """C5: with n = 3 each child is aborted; the id is free again."""
    stack.engine.step_s = 0.01
    call = asyncio.create_task(stack.chat(n=3, max_tokens=400, stream=stream, request_id="gone"))
    await until(lambda: len(stack.engine.live) == 3)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: not stack.engine.live)
    assert stack.engine.num_aborted == 3
    assert stack.handle.core.num_in_flight == 0
    page = (await stack.http.get("/metrics")).text
    assert f'finished_reason="abort",model_name="{MODEL}"}} 3.0' in page
    assert (await stack.chat(request_id="gone", max_tokens=1)).status_code == 200


async def test_many_random_cancels_leave_nothing_c5(stack: FakeStack) -> None:
    stack.engine.step_s = 0.002
    calls = [asyncio.create_task(stack.chat(max_tokens=300, stream=bool(i % 2))) for i in range(40)]
    for i, call in enumerate(calls):
        await asyncio.sleep(0.002 * (i % 5))
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: not stack.engine.live)
    stack.engine.step_s = 0.0
    assert (await stack.chat(max_tokens=2)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_is_a_pause(stack: FakeStack, stream: bool) -> None:
    """Law 1: replayed with its tokens and its seed, the text goes on where it was."""
    stack.engine.script = text_script(TEXT)
    stack.engine.step_s = 0.005
    body = {"model": MODEL, "prompt": "x", "max_tokens": 300, "stream": stream}
    call = asyncio.create_task(stack.http.post("/v1/completions", json=body))
    await until(lambda: any(live.num_output > 20 for live in stack.engine.live.values()))
    for _ in range(2):
        await stack.engine.stop()
        await asyncio.sleep(0.05)
        await stack.engine.start(stack.engine_socket)
        await until(lambda: stack.engine.live)
    answer = await call
    assert answer.status_code == 200
    text = _text_of(answer.text) if stream else answer.json()["choices"][0]["text"]
    assert text == TEXT
    first, *replays = stack.engine.added
    assert len(replays) == 2
    for replay in replays:
        assert replay.request_id == first.request_id
        assert replay.sampling_params.seed == first.sampling_params.seed
        assert len(replay.output_token_ids) >= 20
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == len(TEXT.encode()) + 1


async def test_requests_may_begin_during_the_pause(stack: FakeStack) -> None:
    await stack.engine.stop()
    await until(lambda: not stack.handle.core.engine.availability.ready)
    call = asyncio.create_task(stack.chat(max_tokens=2))
    await asyncio.sleep(0.1)
    assert not call.done()
    assert (await stack.http.get("/health")).status_code == 200, "away is not dead"
    assert (await stack.http.get("/ready")).status_code == 503
    await stack.engine.start(stack.engine_socket)
    assert (await call).status_code == 200


async def test_an_abort_during_the_pause_is_not_replayed(stack: FakeStack) -> None:
    stack.engine.hold = True
    call = asyncio.create_task(stack.chat(max_tokens=5))
    await until(lambda: stack.engine.live)
    await stack.engine.stop()
    await until(lambda: not stack.handle.core.engine.availability.ready)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: stack.handle.core.num_in_flight == 0)
    stack.engine.hold = False
    await stack.engine.start(stack.engine_socket)
    await until(lambda: stack.handle.core.engine.availability.ready)
    assert (await stack.chat(max_tokens=1)).status_code == 200
    assert len(stack.engine.added) == 2


async def test_an_engine_that_stays_away_ends_requests_g3(tmp_path: Path) -> None:
    """G3: UNAVAILABLE after the timeout, and /health says 503 until it is back."""
    async with running_stack(tmp_path, engine_unavailable_timeout_s=0.5) as stack:
        stack.engine.hold = True
        waiting = asyncio.create_task(stack.chat(max_tokens=5))
        streaming = asyncio.create_task(stack.chat(max_tokens=5, stream=True))
        await until(lambda: len(stack.engine.live) == 2)
        await stack.engine.stop()
        for answer in await asyncio.gather(waiting, streaming):
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
        await until(lambda: stack.handle.core.engine.availability.dead)
        assert (await stack.http.get("/health")).status_code == 503
        assert (await stack.chat()).status_code == 503, "refused at once"
        stack.engine.hold = False
        await stack.engine.start(stack.engine_socket)
        await until(lambda: stack.handle.core.engine.availability.ready)
        assert (await stack.http.get("/health")).status_code == 200
        assert (await stack.chat(max_tokens=1)).status_code == 200


async def test_a_slow_reader_gets_all_c8(stack: FakeStack) -> None:
    """C8: deltas are merged for a reader that lags; no text is lost."""
    stack.engine.script = text_script(TEXT)
    stack.engine.tokens_per_step = 7
    body = {"model": MODEL, "prompt": "x", "max_tokens": 300, "stream": True}
    async with stack.http.stream("POST", "/v1/completions", json=body) as response:
        parts = []
        async for part in response.aiter_bytes(64):
            parts.append(part)
            await asyncio.sleep(0.002)
    assert _text_of(b"".join(parts).decode()) == TEXT


@pytest.mark.parametrize("begun", [False, True])
async def test_a_stop_tells_the_streams_that_it_cuts_off(tmp_path: Path, begun: bool) -> None:
    """Before the first chunk a 503, after it an error event and [DONE]; never a broken stream."""
    async with running_stack(tmp_path, shutdown_timeout=0.2) as stack:
        stack.engine.hold = not begun
        stack.engine.step_s = 0.01
        stack.engine.script = text_script(TEXT * 4)
        call = asyncio.create_task(stack.chat(stream=True, max_tokens=400))
        await until(
            lambda: any(live.num_output or not begun for live in stack.engine.live.values())
        )
        stop = asyncio.create_task(stack.handle.stop())
        response = await call
        await stop
        stack.handle.stop = _nothing  # type: ignore[method-assign]
    if begun:
        assert response.status_code == 200
        last, done = [line for line in response.text.splitlines() if line][-2:]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert done == "data: [DONE]"
    else:
        assert response.status_code == 503
        assert "retry-after" in response.headers


async def _nothing() -> None:
    """Already stopped."""
