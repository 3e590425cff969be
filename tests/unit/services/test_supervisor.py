import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.stack.supervisor import ManagedProcess, Supervisor

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


async def until_running(process: ManagedProcess, *, not_pid: int = 0) -> int:
    for _ in range(500):
        running = process.running
        if running is not None and running.returncode is None and running.pid != not_pid:
            return running.pid
        await asyncio.sleep(0.01)
    raise AssertionError("it never ran")


async def test_a_death_before_the_start_is_over_is_reported() -> None:
    broken = ManagedProcess("broken", (sys.executable, "-c", "raise SystemExit(3)"), os.environ)
    supervisor = Supervisor([ManagedProcess("fine", SLEEP, os.environ), broken])
    supervisor.start()
    try:
        assert await asyncio.wait_for(supervisor.first_exit(), 10) == ("broken", 3)
    finally:
        await supervisor.stop()


async def test_a_killed_process_is_restarted_once_restarts_are_on() -> None:
    process = ManagedProcess("victim", SLEEP, os.environ)
    supervisor = Supervisor([process])
    supervisor.start()
    try:
        first = await until_running(process)
        supervisor.restart_from_now_on()
        os.kill(first, signal.SIGKILL)
        second = await until_running(process, not_pid=first)
        assert second != first
    finally:
        await supervisor.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    process = ManagedProcess(
        "deaf", (sys.executable, "-c", code, str(ready)), os.environ, stop_timeout_s=0.1
    )
    running = await process.start()
    while not ready.exists():
        await asyncio.sleep(0.01)
    await process.stop()
    assert running.returncode == -signal.SIGKILL
