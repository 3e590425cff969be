"""Runs the scheduler's steps on the workers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from enginecore import wire
from enginecore.kv_cache_config import KVCacheConfig, WorkerFacts
from enginecore.scheduler_output import ModelRunnerOutput, SchedulerOutput
from enginecore.worker_link import LoadOptions, WorkerLink
from seamline.worker.v1 import worker_pb2
from services.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

_FIRST_LEAP: Final = 1_000_000_000
"""A second, in the nanoseconds that epochs are made of."""
_MAX_EPOCH: Final = 2**64 - 1


class ExecutorLostError(Exception):
    """The workers' streams are gone, and with them the batch and perhaps the cache's contents."""


class Executor(Protocol):
    """Where steps run. The engine's task is its only user.

    Order: `load`, `initialize`, then `execute` as often as wanted. After a loss the same order
    again. `load` and `initialize` raise ServiceError with the worker's own message.
    """

    on_lost: Callable[[], None]
    """Called when the workers are lost, also while no step is under way."""

    @property
    def is_lost(self) -> bool:
        """Whether the workers were lost since the last `initialize`."""

    async def load(self, on_progress: Callable[[float], None]) -> WorkerFacts:
        """Takes the lease, loads the model, measures memory; reports the loaded share, 0 to 1."""

    async def initialize(self, config: KVCacheConfig) -> None:
        """Allocates the cache, warms up and opens the step stream, whose batch is empty."""

    def execute(self, output: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
        """Sends a step without waiting; several may be under way.

        The future is done in the order of the steps. It raises ExecutorLostError.
        """

    async def close(self) -> None:
        """Ends the streams."""


@dataclass(slots=True)
class _PendingStep:
    """A step that some worker has not answered yet."""

    future: "asyncio.Future[ModelRunnerOutput]"
    missing: set[int] = field(default_factory=set)
    output: ModelRunnerOutput | None = None


class GrpcExecutor:
    """Sends each step to every worker and takes the result of the first.

    Workers of one group compute the same tokens; the others' answers only tell that they are in
    step.

    Args:
        addresses: the workers.
        engine_id: this enginecore, unique per process start.
        options: what to load and how.
    """

    def __init__(self, addresses: Sequence[str], engine_id: str, options: LoadOptions) -> None:
        self._addresses = addresses
        self._engine_id = engine_id
        self._options = options
        self._links: list[WorkerLink] = []
        self._pending: dict[int, _PendingStep] = {}
        self._epoch = 0
        self._leap = _FIRST_LEAP
        self._lost: ExecutorLostError | None = None
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def is_lost(self) -> bool:
        """Whether the workers were lost since the last `initialize`."""
        return self._lost is not None

    async def load(self, on_progress: Callable[[float], None]) -> WorkerFacts:
        """Takes the lease, loads the model, measures memory."""
        await self.close()
        # Over every epoch that an enginecore on a machine with the same clock has had.
        self._epoch = min(max(time.time_ns(), self._epoch + self._leap), _MAX_EPOCH)
        self._links = [WorkerLink(address, self._epoch) for address in self._addresses]
        try:
            attached = await asyncio.gather(*(link.attach(self._engine_id) for link in self._links))
        except FailedPreconditionError:
            # The last holder's clock was ahead of ours: its epoch is found by longer and longer
            # leaps, not by waiting until our clock is there.
            self._leap *= 2
            raise
        self._leap = _FIRST_LEAP
        models = await asyncio.gather(
            *(link.load_model(self._options, on_progress) for link in self._links)
        )
        available = await asyncio.gather(
            *(link.profile_memory(self._options) for link in self._links)
        )
        return WorkerFacts(
            attached[0].device, wire.model_facts_from_proto(models[0]), min(available)
        )

    async def initialize(self, config: KVCacheConfig) -> None:
        """Allocates the cache, warms up and opens the step stream."""
        await asyncio.gather(
            *(link.initialize(config, self._options) for link in self._links),
        )
        self._lost = None
        for rank, link in enumerate(self._links):
            link.open_stream(partial(self._take, rank), self._lose)

    def execute(self, output: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
        """Sends a step to every worker."""
        future: asyncio.Future[ModelRunnerOutput] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        self._pending[output.step] = _PendingStep(future, set(range(len(self._links))))
        message = wire.scheduler_output_to_proto(output, self._epoch)
        for link in self._links:
            link.send(message)
        return future

    def _take(self, rank: int, message: worker_pb2.ExecuteResponse) -> None:
        """Books one worker's result."""
        step = message.model_runner_output.step
        pending = self._pending.get(step)
        if message.epoch != self._epoch or pending is None or rank not in pending.missing:
            self._lose(UnavailableError(f"the worker answered step {step}, which was not asked"))
            return
        pending.missing.remove(rank)
        try:
            if rank == 0:
                pending.output = wire.model_runner_output_from_proto(message.model_runner_output)
        except InvalidArgumentError as error:
            self._lose(error)
            return
        if not pending.missing and pending.output is not None:
            del self._pending[step]
            if not pending.future.done():
                pending.future.set_result(pending.output)

    def _lose(self, reason: Exception) -> None:
        """Gives up all streams: they are only useful together."""
        if self._lost is not None:
            return
        self._lost = ExecutorLostError(str(reason))
        for link in self._links:
            link.close_stream()
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self._lost)
        self._pending.clear()
        self.on_lost()

    async def close(self) -> None:
        """Ends the streams."""
        links, self._links = self._links, []
        self._lost = self._lost or ExecutorLostError("closed")
        for link in links:
            await link.close()
