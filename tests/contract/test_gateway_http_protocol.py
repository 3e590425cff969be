"""Clients that never finish what they send."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway import http_protocol
from gateway.routes import body
from tests.fakes.gateway import FakeStack, running_stack

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    async with running_stack(tmp_path) as running:
        yield running


async def connect(stack: FakeStack) -> Streams:
    return await asyncio.open_connection("127.0.0.1", stack.handle.port)


async def answer_of(streams: Streams) -> bytes:
    """All that comes until the server closes."""
    reader, writer = streams
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except OSError:  # closed while we were still sending
        return b""
    finally:
        writer.close()


async def test_an_endless_head_ends_the_connection(stack: FakeStack) -> None:
    streams = await connect(stack)
    streams[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    for _ in range(200):
        if streams[1].is_closing() or streams[0].at_eof():
            break
        streams[1].write(b"x-filler: " + b"y" * 4096 + b"\r\n")
        await asyncio.sleep(0.001)
    else:
        pytest.fail("800 kB of headers were taken")
    assert (await answer_of(streams))[:12] in (b"HTTP/1.1 400", b"")
    assert (await stack.http.get("/health")).status_code == 200


async def test_large_bodies_are_not_heads(stack: FakeStack) -> None:
    """One read may bring a head, its body and another head; only heads count."""
    prompt = "x" * (http_protocol.MAX_HEAD_BYTES // 2)
    reader, writer = await connect(stack)
    body_bytes = b'{"prompt": "' + prompt.encode() + b'", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"content-length: " + str(len(body_bytes)).encode() + b"\r\n\r\n"
    for _ in range(4):
        writer.write(head + body_bytes)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        (length,) = [
            line.split(b": ")[1]
            for line in answer.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        ]
        assert b"context_length_exceeded" in await reader.readexactly(int(length))
    writer.write(HEALTH)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nhos"])
async def test_a_head_that_never_ends_is_cut_off(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    streams = await connect(stack)
    streams[1].write(start)
    began_s = time.monotonic()
    assert (await answer_of(streams)).startswith(b"HTTP/1.1 400")
    assert time.monotonic() - began_s < 5


async def test_a_kept_connection_may_rest_longer_than_a_head_may_take(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await connect(stack)
    for _ in range(2):
        writer.write(HEALTH)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await reader.readexactly(len(b'{"status":"ok"}'))
        await asyncio.sleep(0.5)
    writer.write(HEALTH[:10])
    assert (await answer_of((reader, writer))).startswith(b"HTTP/1.1 400")


async def test_a_body_that_never_ends_is_cut_off(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.2)
    reader, writer = await connect(stack)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 1000\r\n\r\n{"
    )
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
    writer.close()
