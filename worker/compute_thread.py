"""The one thread that runs torch. The event loop hands it jobs and never waits in it."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComputeThread:
    """Runs jobs one after the other, in the order in which they were given."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Runs `job` when its turn comes; what it raises is logged."""
        self._jobs.put(job)

    async def call(self, job: Callable[[], T]) -> T:
        """Runs `job` and returns what it returned, or raises what it raised.

        Cancelling does not stop a job that has begun or waits.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                loop.call_soon_threadsafe(_fail, future, error)
            else:
                loop.call_soon_threadsafe(_finish, future, result)

        self.post(run)
        return await future

    def stop(self) -> None:
        """Ends after the jobs that were given; does not wait."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits, after `stop`, until the thread has ended.

        A thread that is still in native code when the interpreter goes away aborts the process.
        """
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of the compute thread failed")


def _finish(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
