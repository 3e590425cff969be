"""`seamline serve`: the whole stack on one machine, with the embedded model when none is named.

    prepare the model file → start worker, enginecore, gateway → wait for /ready → watch

Each service gets only its own settings, through its environment (a command line would show API
keys in `ps`). Until the stack was ready once, any exit ends the launch, so that a wrong model is
one clear failure; from then on a process that dies is restarted.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import uvloop

from services import embedded_model
from services.errors import InvalidArgumentError, ServiceError, UnavailableError
from services.logging import configure_logging
from services.process import PARENT_FLAG
from services.settings import load_settings
from services.stack.http_port import settle_port
from services.stack.settings import SERVICES, StackPlan, StackSettings, plan
from services.stack.supervisor import ManagedProcess, Supervisor
from worker.cpu_topology import configure_openmp

POLL_INTERVAL_S: Final = 0.05
POLL_TIMEOUT_S: Final = 2.0
STOP_MARGIN_S: Final = 10.0
"""On top of the shutdown timeout, before a service that does not end is killed."""
MAX_SOCKET_PATH_BYTES: Final = 107
"""The kernel's limit."""
SAID_WHY: Final = 1
"""The exit status of a service that has told the reason itself."""


class Runner(Protocol):
    """A way to run the services."""

    async def start(self) -> None:
        """Starts all of them."""

    def restart_from_now_on(self) -> None:
        """The stack was ready: from now on a death is repaired."""

    async def ended(self) -> int:
        """Waits until the stack cannot go on; the exit status to give."""

    async def stop(self) -> None:
        """Ends all of them."""


class Processes:
    """One supervised process per service."""

    def __init__(self, stack: StackPlan, stop_timeout_s: float) -> None:
        self._supervisor = Supervisor(
            [
                ManagedProcess(
                    name,
                    (sys.executable, "-m", name, PARENT_FLAG),
                    stack.environment(name, os.environ),
                    stop_timeout_s,
                )
                for name in SERVICES
            ]
        )

    async def start(self) -> None:
        """Starts all of them."""
        self._supervisor.start()

    def restart_from_now_on(self) -> None:
        """From now on a process that dies is restarted."""
        self._supervisor.restart_from_now_on()

    async def ended(self) -> int:
        """Waits for a process that ended and is not restarted."""
        name, status = await self._supervisor.first_exit()
        if status != SAID_WHY:
            _say(f"seamline: {name} ended with status {status}", error=True)
        return status or SAID_WHY

    async def stop(self) -> None:
        """Ends all of them."""
        await self._supervisor.stop()


def serve(argv: Sequence[str]) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""
    try:
        settings = load_settings(StackSettings, argv, prog="seamline serve")
        port = settle_port(settings.host, settings.port)
        settings = settings.model_copy(update={"port": port})
        configure_logging(settings.log_level, settings.log_format, service="seamline")
        if not settings.model and not embedded_model.is_present(settings.cache_dir):
            _say("Downloading the default model, SmolLM2-135M-Instruct (93 MB) ...")
            embedded_model.fetch(settings.cache_dir)
        with _run_dir(settings) as run_dir:
            return uvloop.run(_serve(settings, plan(settings, run_dir)))
    except ServiceError as error:
        _say(f"seamline: {error.message}", error=True)
        return SAID_WHY


async def _serve(settings: StackSettings, stack: StackPlan) -> int:
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    runner = _runner(settings, stack)
    tasks: list[asyncio.Task[object]] = []
    try:
        await runner.start()
        stopping = asyncio.create_task(signalled.wait())
        ended = asyncio.create_task(runner.ended())
        ready = asyncio.create_task(_until_ready(settings))
        tasks += [stopping, ended, ready]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            runner.restart_from_now_on()
            _announce(settings, ready.result())
            await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
        return ended.result() if ended.done() else 0
    finally:
        for task in tasks:
            task.cancel()
        await runner.stop()


def _runner(settings: StackSettings, stack: StackPlan) -> Runner:
    if settings.single_process:
        # imported here: it brings torch into this process
        configure_openmp(settings.num_threads)
        from services.stack.single_process import SingleProcess

        return SingleProcess(stack)
    return Processes(stack, settings.shutdown_timeout + STOP_MARGIN_S)


async def _until_ready(settings: StackSettings) -> float:
    """Polls the gateway, tells each new state, and returns the seconds it took."""
    started_s = time.monotonic()
    url = f"http://{_host(settings)}:{settings.port}/ready"
    told = ""
    while True:
        state = await asyncio.to_thread(_readiness, url)
        if state is None:
            return time.monotonic() - started_s
        if state != told:
            _say(f"  {state}")
            told = state
        await asyncio.sleep(POLL_INTERVAL_S)


def _readiness(url: str) -> str | None:
    """What the stack is waiting for; None when it is ready."""
    try:
        with urllib.request.urlopen(url, timeout=POLL_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.load(error)["error"]["message"])
        return f"the gateway answers {error.code}"
    except OSError:
        return "starting the services"


def _announce(settings: StackSettings, took_s: float) -> None:
    base = f"http://{_host(settings)}:{settings.port}"
    name = (settings.served_model_name or (embedded_model.NAME,))[0]
    body = json.dumps(
        {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    )
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key else ""
    _say(f"Seamline is ready after {took_s:.1f} s: OpenAI API at {base}/v1, model {name}")
    _say(f"  gateway.v1 over gRPC at {settings.listen_address}")
    _say(f"Try:\n  curl {base}/v1/chat/completions{key} -H 'Content-Type: application/json' \\")
    _say(f"    -d '{body}'")


def _host(settings: StackSettings) -> str:
    """Where this machine reaches the gateway."""
    return "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host


@contextlib.contextmanager
def _run_dir(settings: StackSettings) -> Iterator[Path]:
    """The folder of the sockets; a temporary one is removed at the end."""
    if settings.run_dir is not None:
        _make_run_dir(settings.run_dir)
        yield settings.run_dir
        return
    # a short folder of our own
    folder = Path(tempfile.mkdtemp(prefix="seamline-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_run_dir(folder: Path) -> None:
    longest = max(len(os.fsencode(f"{folder}/{name}.sock")) for name in SERVICES)
    if longest > MAX_SOCKET_PATH_BYTES:
        raise InvalidArgumentError(f"--run-dir: {folder} is too long for the path of a Unix socket")
    if "," in str(folder):
        raise InvalidArgumentError(f"--run-dir: {folder} has a comma, which separates addresses")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UnavailableError(f"--run-dir: {folder}: {error.strerror}") from error


def _say(line: str, *, error: bool = False) -> None:
    """Speaks to the person at the terminal."""
    print(line, file=sys.stderr if error else sys.stdout, flush=True)
