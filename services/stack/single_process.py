"""All three services in one process and one event loop, still over the wire.

For one debugger that reaches the scheduler and the model; slower, and nothing is restarted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from enginecore.app import start_enginecore
from gateway.app import start_gateway
from services.process import RunningService
from services.stack.settings import StackPlan
from services.telemetry import configure_telemetry, shutdown_telemetry
from worker.app import start_worker

STARTS: Final[Mapping[str, Callable[[Any], Awaitable[RunningService]]]] = {
    "worker": start_worker,
    "enginecore": start_enginecore,
    "gateway": start_gateway,
}
"""In the order of starting."""


class SingleProcess:
    """Runs the services in this event loop."""

    def __init__(self, stack: StackPlan) -> None:
        self._stack = stack
        self._running: list[RunningService] = []

    async def start(self) -> None:
        """Starts all of them."""
        configure_telemetry("seamline")
        for name, start in STARTS.items():
            self._running.append(await start(self._stack.settings(name)))

    def restart_from_now_on(self) -> None:
        """Does nothing: what runs in one process dies as one."""

    async def ended(self) -> int:
        """Waits for a service that ends by itself; raises the ServiceError of one that fails."""
        waits = [asyncio.create_task(service.wait()) for service in self._running]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
        return 1

    async def stop(self) -> None:
        """Ends all of them; those that others call end last."""
        for service in reversed(self._running):
            await service.stop()
        shutdown_telemetry()
