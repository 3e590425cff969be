"""`python -m enginecore` as a process of its own, in front of a fake worker."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.channel import open_channel
from services.errors import NotFoundError
from tests.fakes.engine_stack import core_request
from tests.fakes.shadow_batch import expected_tokens
from tests.fakes.worker import FakeModel, FakeWorker


@asynccontextmanager
async def process(model: FakeModel, *flags: str) -> AsyncGenerator[tuple[Process, str]]:
    with tempfile.TemporaryDirectory(prefix="seamline-") as folder:
        worker = FakeWorker(f"unix:{folder}/worker.sock", model)
        await worker.start()
        address = f"unix:{folder}/engine.sock"
        arguments = ["--model", "m.gguf", "--listen-address", address, *flags]
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "enginecore", "--worker-address", worker.address),
            *arguments,
            stderr=PIPE,
        )
        try:
            yield started, address
        finally:
            if started.returncode is None:
                started.kill()
            await started.wait()
            await worker.stop()


async def test_missing_model_ends_it_with_one_line() -> None:
    model = FakeModel(load_error=NotFoundError("no such model: m.gguf"))
    async with process(model) as (started, _):
        _, stderr = await asyncio.wait_for(started.communicate(), 30)
        assert started.returncode == 1
        assert stderr.decode().splitlines()[-1] == "enginecore: no such model: m.gguf"
        assert b"Traceback" not in stderr


@pytest.mark.parametrize("shutdown_timeout", ["0", "20"])
async def test_sigterm_drains_for_as_long_as_it_is_told(shutdown_timeout: str) -> None:
    flags = ["--shutdown-timeout", shutdown_timeout]
    async with process(FakeModel(), *flags) as (started, address), open_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        async with asyncio.timeout(30):
            while True:
                try:
                    info = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
                except Exception:  # noqa: BLE001 - not listening yet
                    info = engine_pb2.GetEngineInfoResponse()
                if info.state == engine_pb2.ENGINE_STATE_READY:
                    break
                await asyncio.sleep(0.05)
        request = core_request("a", [1, 2, 3], 400)
        call = stub.Generate(engine_pb2.GenerateRequest(request=request))
        responses = aiter(call)
        tokens = list((await anext(responses)).new_token_ids)
        started.send_signal(signal.SIGTERM)
        try:
            async for response in responses:
                tokens += response.new_token_ids
        except Exception:  # noqa: BLE001 - cut off, as told
            assert shutdown_timeout == "0"
        else:
            assert shutdown_timeout == "20"
            assert tokens == expected_tokens([1, 2, 3], 400)
        assert await asyncio.wait_for(started.wait(), 20) == 0


def test_torch_is_never_loaded() -> None:
    program = (
        "import sys, enginecore.app, enginecore.__main__;"
        "print([m for m in ('torch', 'kernels', 'worker', 'gateway') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"
