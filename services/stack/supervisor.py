"""Keeps processes running: starts them, restarts the ones that die, ends them in order.

Only processes that it started are ever signalled, and by pid.
"""

import asyncio
import contextlib
import logging
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.channel import Backoff

log = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S: Final = 0.1
LONGEST_RESTART_DELAY_S: Final = 5.0
HEALTHY_AFTER_S: Final = 30.0
"""A process that lived this long starts over with the shortest delay."""


@dataclass(slots=True)
class ManagedProcess:
    """A process to keep running.

    Attributes:
        name: for logs.
        argv: the command.
        env: its whole environment.
        stop_timeout_s: how long it may take to end.
        restart: whether to start it again when it dies; while False its death ends the watch.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stop_timeout_s: float = 10.0
    restart: bool = False
    running: Process | None = field(default=None, init=False)

    async def start(self) -> Process:
        """Starts it now."""
        # a session of its own: Ctrl-C reaches the launcher alone, which then stops all in order
        self.running = await asyncio.create_subprocess_exec(
            *self.argv, env=dict(self.env), start_new_session=True
        )
        return self.running

    async def watch(self) -> int:
        """Runs it, again and again while `restart` is set; returns the status of the last exit."""
        backoff = Backoff(FIRST_RESTART_DELAY_S, LONGEST_RESTART_DELAY_S)
        while True:
            started_s = asyncio.get_running_loop().time()
            status = await (await self.start()).wait()
            if not self.restart:
                return status
            if asyncio.get_running_loop().time() - started_s > HEALTHY_AFTER_S:
                backoff.reset()
            delay_s = backoff.next_delay_s()
            log.warning(
                "%s died and is restarted",
                self.name,
                extra={"status": status, "delay_s": round(delay_s, 2)},
            )
            await asyncio.sleep(delay_s)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when it takes too long."""
        self.restart = False
        process = self.running
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.stop_timeout_s)
        except TimeoutError:
            log.warning("%s did not end and is killed", self.name)
            process.kill()
            await process.wait()


class Supervisor:
    """Watches a few processes.

    Args:
        processes: in the order in which they are started; they are stopped in the reverse order.
    """

    def __init__(self, processes: Sequence[ManagedProcess]) -> None:
        self._processes = processes
        self._watches: dict[asyncio.Task[int], ManagedProcess] = {}

    def start(self) -> None:
        """Starts all of them."""
        self._watches = {asyncio.create_task(p.watch()): p for p in self._processes}

    def restart_from_now_on(self) -> None:
        """From now on a death is followed by a restart instead of ending the watch."""
        for process in self._processes:
            process.restart = True

    async def first_exit(self) -> tuple[str, int]:
        """Waits for a process that ended and is not restarted: its name and exit status."""
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        task = next(iter(done))
        return self._watches[task].name, task.result()

    async def stop(self) -> None:
        """Ends all of them; those that others call end last."""
        for process in self._processes:
            process.restart = False
        for process in reversed(self._processes):
            await process.stop()
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
