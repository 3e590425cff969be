"""A stack of real processes for benchmarks and end-to-end tests, and what its processes cost."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Final, Self

import psutil

READY_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 30.0
SERVICES: Final = ("gateway", "enginecore", "worker")


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """What a process took so far.

    Attributes:
        cpu_s: user and system time, in seconds.
        resident_bytes: memory in use now.
    """

    cpu_s: float
    resident_bytes: int


class LaunchedStack:
    """`seamline serve` on free ports, from entering the context until leaving it.

    Args:
        flags: more flags of `seamline serve`.
        env: variables to add to this process's environment.
        log_path: where its output goes; unset: to this process's stderr.
    """

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self._flags = flags
        self._env = {**os.environ, **(env or {})}
        self._log_path = log_path
        self.port = free_port()
        self.grpc_address = f"127.0.0.1:{free_port()}"
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._run_dir = TemporaryDirectory(prefix="seamline-")
        self.enginecore_address = f"unix:{self._run_dir.name}/enginecore.sock"
        self.ready_after_s = 0.0
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        started = time.monotonic()
        command = [sys.executable, "-m", "services.cli", "serve", "--port", str(self.port)]
        command += ["--listen-address", self.grpc_address, "--run-dir", self._run_dir.name]
        command += self._flags
        with self._log_path.open("w") if self._log_path else nullcontext(sys.stderr) as log:
            self.process = subprocess.Popen(
                command, env=self._env, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        self.ready_after_s = time.monotonic() - started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ends the stack as Ctrl-C would, and returns its exit status."""
        process = self.process
        assert process is not None
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()
        self._run_dir.cleanup()
        return process.wait()

    def services(self) -> dict[str, psutil.Process]:
        """The service processes that run now, by name."""
        assert self.process is not None
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            found.update({name: child for name in SERVICES if name in command})
        return found

    def costs(self) -> dict[str, ProcessCost]:
        """What each service process took so far."""
        running = self.services()
        return {name: _cost(running[name]) for name in SERVICES if name in running}

    def _wait_until_ready(self) -> None:
        process = self.process
        assert process is not None
        assert process.stdout is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        for line in process.stdout:
            if self.base_url in line:
                return
            if time.monotonic() > deadline:
                break
        raise RuntimeError(f"the stack did not start (status {process.poll()})")


def _cost(process: psutil.Process) -> ProcessCost:
    times = process.cpu_times()
    return ProcessCost(times.user + times.system, process.memory_info().rss)
