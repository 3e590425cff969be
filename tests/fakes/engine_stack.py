"""An enginecore on a Unix socket in front of a fake worker."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from enginecore.app import Enginecore, start_enginecore
from enginecore.engine_state import EngineState
from enginecore.executor import Executor
from enginecore.settings import EnginecoreSettings
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.channel import open_channel
from tests.fakes.worker import FakeModel, FakeWorker

GenerateCall = grpc.aio.UnaryStreamCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse]


@dataclass
class EngineStack:
    """What a test talks to."""

    enginecore: Enginecore
    worker: FakeWorker
    stub: "engine_pb2_grpc.EngineServiceAsyncStub"
    channel: grpc.aio.Channel

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        scheduler = self.enginecore.engine.scheduler
        assert scheduler is not None
        return scheduler.stats().num_free_blocks

    @property
    def num_unfinished(self) -> int:
        """Requests without a final answer."""
        scheduler = self.enginecore.engine.scheduler
        return len(scheduler.requests) if scheduler is not None else 0

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int | None = 8,
        timeout: float | None = None,
        **fields: Any,
    ) -> GenerateCall:
        """Starts one request."""
        request = core_request(request_id, prompt, max_tokens, **fields)
        return self.stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=timeout)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Polls; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def replace_worker(self) -> FakeWorker:
        """A new process at the dead worker's address."""
        self.worker = FakeWorker(
            self.worker.address, self.worker.model, step_delay_s=self.worker.step_delay_s
        )
        await self.worker.start()
        return self.worker


def core_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int | None = 8,
    **fields: Any,
) -> engine_pb2.EngineCoreRequest:
    """A request with defaults."""
    request = engine_pb2.EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, **fields)
    if max_tokens is not None:
        request.sampling_params.max_tokens = max_tokens
    return request


async def collect(call: GenerateCall) -> tuple[list[int], engine_pb2.FinishedRequest]:
    """All tokens of a call and its final answer."""
    tokens: list[int] = []
    finished = []
    async for response in call:
        tokens += response.new_token_ids
        if response.HasField("finished"):
            finished.append(response.finished)
    assert len(finished) == 1
    return tokens, finished[0]


@contextlib.asynccontextmanager
async def engine_stack(
    *,
    model: FakeModel | None = None,
    step_delay_s: float = 0.0,
    start_worker: bool = True,
    wait_ready: bool = True,
    make_executor: Callable[[EnginecoreSettings], Executor] | None = None,
    **settings: Any,
) -> AsyncGenerator[EngineStack]:
    """Runs both until the block ends; fails if the worker saw an impossible stream."""
    with tempfile.TemporaryDirectory(prefix="seamline-") as folder:
        worker = FakeWorker(
            f"unix:{folder}/worker.sock", model or FakeModel(), step_delay_s=step_delay_s
        )
        if start_worker:
            await worker.start()
        loaded = EnginecoreSettings(
            listen_address=f"unix:{folder}/engine.sock",
            worker_address=(worker.address,),
            model="fake",
            **settings,
        )
        executor = make_executor(loaded) if make_executor is not None else None
        enginecore = await start_enginecore(loaded, executor)
        channel = open_channel(enginecore.address)
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        stack = EngineStack(enginecore, worker, stub, channel)
        try:
            if wait_ready:
                await stack.wait_until(lambda: enginecore.engine.state is EngineState.READY)
            yield stack
            assert stack.worker.mismatches == []
        finally:
            await channel.close()
            await enginecore.stop()
            await stack.worker.stop()
