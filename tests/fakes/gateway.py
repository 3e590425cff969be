"""A whole gateway over a fake engine, on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from openai import AsyncOpenAI

from gateway.app import GatewayHandle, start_gateway
from gateway.settings import GatewaySettings
from seamline.gateway.v1 import gateway_pb2_grpc
from services.channel import open_channel
from tests.fakes.engine import FakeEngine
from tests.fakes.tokenizer import write_byte_model

MODEL = "byte-model"
TIMEOUT_S = 10.0


@dataclass
class FakeStack:
    """What a test drives."""

    engine: FakeEngine
    handle: GatewayHandle
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    channel: grpc.aio.Channel
    engine_socket: Path

    @property
    def stub(self) -> "gateway_pb2_grpc.GatewayServiceAsyncStub":
        """A gateway.v1 client."""
        return gateway_pb2_grpc.GatewayServiceStub(self.channel)

    async def chat(self, **more: Any) -> httpx.Response:
        """Posts a chat completion."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
        return await self.http.post("/v1/chat/completions", json=body)


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition that another task makes true."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running_stack(
    folder: Path, *, wait_ready: bool = True, **settings: Any
) -> AsyncIterator[FakeStack]:
    """A gateway, its fake engine and clients of it; ended in order."""
    engine = FakeEngine()
    engine_socket = folder / "engine.sock"
    address = await engine.start(engine_socket)
    given = {
        "model": str(write_byte_model(folder / MODEL)),
        "port": 0,
        "listen_address": f"unix:{folder}/gateway.sock",
        "enginecore_address": address,
        "cache_dir": folder / "cache",
        "shutdown_timeout": 1.0,
        **settings,
    }
    handle = await start_gateway(GatewaySettings(**given))
    if wait_ready:
        await until(lambda: handle.core.engine.availability.ready)
    key = given.get("api_key", ("none",))[0]
    channel = open_channel(handle.grpc_address)
    openai = AsyncOpenAI(base_url=f"{handle.base_url}/v1", api_key=key, max_retries=0)
    try:
        async with httpx.AsyncClient(base_url=handle.base_url, timeout=TIMEOUT_S) as http:
            yield FakeStack(engine, handle, http, openai, channel, engine_socket)
    finally:
        await openai.close()
        await channel.close()
        await handle.stop()
        await engine.stop()
