"""A running load, which several callers may follow. Belongs to the event loop."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from worker.compute_thread import ComputeThread
from worker.worker import LoadedModel, ModelSpec, Worker

# progress messages per load: enough for a bar, too few to matter
_REPORTS = 50


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of weights in place; a total of 0 is not known yet."""

    loaded_bytes: int = 0
    total_bytes: int = 0


class ModelLoad:
    """Starts a load on the compute thread; it goes on whoever stops following it."""

    def __init__(self, spec: ModelSpec, worker: Worker, compute: ComputeThread) -> None:
        self.spec = spec
        self._progress = LoadProgress()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._reported = 0
        self._task = asyncio.create_task(
            compute.call(lambda: worker.load_model(spec, self._on_progress))
        )
        self._task.add_done_callback(self._on_done)

    @property
    def is_running(self) -> bool:
        """It has neither succeeded nor failed."""
        return not self._task.done()

    async def updates(self) -> AsyncIterator[LoadProgress]:
        """Yields progress until the load ends."""
        while not self._task.done():
            yield self._progress
            changed = self._changed
            await changed.wait()

    async def result(self) -> LoadedModel:
        """What was loaded. Errors: those of `Worker.load_model`."""
        return await asyncio.shield(self._task)

    def _on_done(self, task: asyncio.Task[LoadedModel]) -> None:
        """Wakes the followers; there may be none left to see the error, so it is fetched here."""
        if not task.cancelled():
            task.exception()
        self._changed.set()

    def _on_progress(self, loaded: int, total: int) -> None:
        """Called on the compute thread, once per tensor."""
        if loaded == total or (loaded - self._reported) * _REPORTS >= total:
            self._reported = loaded
            self._loop.call_soon_threadsafe(self._advance, LoadProgress(loaded, total))

    def _advance(self, progress: LoadProgress) -> None:
        self._progress = progress
        changed, self._changed = self._changed, asyncio.Event()
        if self._task.done():
            self._changed.set()
        changed.set()
