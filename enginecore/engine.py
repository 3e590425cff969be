"""The engine: one task that schedules, executes, updates and publishes."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from enginecore.clients import Clients
from enginecore.clock import Clock
from enginecore.engine_state import EngineFacts, EngineOptions, EngineState
from enginecore.executor import Executor, ExecutorLostError
from enginecore.kv_cache_config import plan_kv_cache
from enginecore.kv_cache_manager import KVCacheManager
from enginecore.outbox import Outbox
from enginecore.request import FinishedRequest, FinishReason, Request, RequestStatus
from enginecore.scheduler import Scheduler
from enginecore.scheduler_output import EngineCoreOutput
from enginecore.tracing import RequestTracer
from services.channel import Backoff
from services.errors import (
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    ServiceError,
    UnavailableError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_FATAL: Final = {
    ErrorCode.NOT_FOUND,
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNIMPLEMENTED,
}
"""What a worker's start-up answers when trying again cannot help."""

_MAX_HANDLE: Final = 2**32 - 1


class Engine:
    """Runs requests on an executor.

    `run` is the engine's task and alone touches the scheduler. Everybody else is on the same event
    loop, puts calls into the inbox and reads outboxes; the task takes the inbox between the parts
    of a step, so that an abort during a step wins over the step's result. There are no locks.

    When the workers are lost, all running requests go back to the queue in their order, the engine
    attaches again and goes on: clients see a pause. `FAILED` is final and means that no attempt
    could succeed.

    Args:
        executor: where steps run.
        options: what the operator asked for.
        engine_id: unique per process start.
        on_state_change: called when `state` has changed.
    """

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions,
        engine_id: str,
        on_state_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.options = options
        self.engine_id = engine_id
        self.clock = Clock()
        self.epoch = self.clock.now_ns()
        self.facts: EngineFacts | None = None
        self.load_progress_ratio = 0.0
        self.status_message = "waiting for the worker"
        self.failure: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
        self.last_step = 0
        self.tracer = RequestTracer(self.clock)
        self.clients = Clients(self.tracer)
        self.scheduler: Scheduler | None = None
        self._executor = executor
        self._on_state_change = on_state_change
        self._state = EngineState.STARTING
        self._draining = False
        self._stopping = False
        self._inbox: deque[Callable[[], None]] = deque()
        self._wakeup = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._last_handle = 0
        executor.on_lost = self._wakeup.set

    # ---- for the edges

    @property
    def state(self) -> EngineState:
        """The state now."""
        if self._draining and self._state in (EngineState.READY, EngineState.RECOVERING):
            return EngineState.DRAINING
        return self._state

    def check_accepting(self) -> EngineFacts:
        """The facts that a new request needs. Errors: UnavailableError."""
        if self.facts is None or self.state not in (EngineState.READY, EngineState.RECOVERING):
            raise UnavailableError(f"the engine is {self.state.value}: {self.status_message}")
        return self.facts

    def next_handle(self) -> int:
        """A handle that no live request has."""
        live = self.scheduler.requests if self.scheduler is not None else ()
        while True:
            self._last_handle = self._last_handle % _MAX_HANDLE + 1
            if self._last_handle not in live:
                return self._last_handle

    def submit(self, outbox: Outbox, group: Sequence[tuple[int, Request]]) -> None:
        """Queues requests, all or none; each gets one final answer in the outbox."""
        self._post(partial(self._add, outbox, group))

    def refuse(
        self, outbox: Outbox, group: Sequence[tuple[int, Request]], error: ServiceError
    ) -> None:
        """Answers requests with an error instead of queueing them."""
        self._post(partial(self._refuse, outbox, group, error))

    def abort(self, outbox: Outbox, client_handles: Iterable[int]) -> None:
        """Ends requests of a client; those that are not live are ignored."""
        self._post(partial(self._abort, outbox, client_handles))

    def detach(self, outbox: Outbox) -> None:
        """Ends a client and all its requests, without answers."""
        outbox.close()
        self._post(partial(self._detach, outbox))

    async def reset_prefix_cache(self) -> bool:
        """Forgets all prefixes; False while a block is in use."""
        return await self._call(
            lambda: self.scheduler is None or self.scheduler.reset_prefix_cache()
        )

    async def drain(self, timeout_s: float | None) -> int:
        """Takes nothing new and waits for the rest; aborts and counts what is left then."""
        await self.drain_until_empty(timeout_s)
        return await self._call(self._abort_all)

    async def drain_until_empty(self, timeout_s: float | None) -> None:
        """Takes nothing new and waits for the rest, at most `timeout_s` seconds."""
        await self._call(self._begin_drain)
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            log.info("drain timed out", extra={"timeout_s": timeout_s})

    async def stop(self) -> None:
        """Ends clients' streams with UNAVAILABLE; then `run` may be cancelled."""
        await self._call(self._stop)

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._wakeup.set()

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs a function in the engine's task."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(lambda: None if future.done() else future.set_result(function()))
        return await future

    # ---- the task

    async def run(self) -> None:
        """Attaches to the workers and serves until `stop`."""
        try:
            await self._attach("waiting for the worker")
            while not self._stopping:
                await self._advance()
        except ServiceError as error:
            self._fail(error)
        except Exception:
            log.exception("the engine failed")
            self._fail(InternalError("the engine failed; its log has the cause"))
        while not self._stopping:
            await self._sleep()

    async def _advance(self) -> None:
        """One turn: recover, run a step, or wait for news."""
        assert self.scheduler is not None
        self._take_inbox()
        try:
            if self._executor.is_lost:
                await self._recover()
            elif self.scheduler.has_work:
                await self.step(self.scheduler)
            else:
                await self._sleep()
        except ExecutorLostError as error:
            log.warning("lost the worker: %s", error)
            await self._recover()

    async def step(self, scheduler: Scheduler) -> None:
        """Schedules, executes, updates, publishes."""
        scheduled = scheduler.schedule()
        if scheduled.is_empty:
            await self._sleep()
            return
        self.tracer.on_scheduled(scheduled, scheduler.requests)
        result = await self._attend(self._executor.execute(scheduled))
        outputs = scheduler.update_from_output(scheduled, result)
        self.last_step = scheduled.step
        self._publish(outputs)

    async def _attend(self, work: "asyncio.Future[T]") -> T:
        """Waits for `work` while taking the inbox and watching deadlines."""
        work.add_done_callback(lambda _: self._wakeup.set())
        try:
            while not work.done():
                await self._sleep()
            return work.result()
        finally:
            work.cancel()

    async def _sleep(self) -> None:
        """Waits for news or the next deadline, then takes the inbox."""
        deadline_ns = self.scheduler.next_deadline_ns() if self.scheduler is not None else None
        timer = None
        if deadline_ns is not None:
            delay_s = max(0, deadline_ns - self.clock.now_ns()) / 1e9
            timer = asyncio.get_running_loop().call_later(delay_s, self._wakeup.set)
        await self._wakeup.wait()
        self._wakeup.clear()
        if timer is not None:
            timer.cancel()
        self._take_inbox()

    def _take_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        if self.scheduler is not None:
            expired = self.scheduler.expire()
            if expired:
                self._publish_finished(expired)

    # ---- the inbox's calls

    def _add(self, outbox: Outbox, group: Sequence[tuple[int, Request]]) -> None:
        requests = [request for _, request in group]
        if not outbox.is_open:
            # Its client left before its turn: it must never run.
            self._publish_refused(requests, FinishReason.ABORT)
            return
        for client_handle, request in group:
            self.clients.add(outbox, client_handle, request)
        try:
            self.check_accepting()
            assert self.scheduler is not None
            self._publish_finished(self.scheduler.add_requests(requests))
        except ServiceError as error:
            self._publish_refused(requests, FinishReason.ERROR, error)

    def _refuse(
        self, outbox: Outbox, group: Sequence[tuple[int, Request]], error: ServiceError
    ) -> None:
        for client_handle, request in group:
            self.clients.add(outbox, client_handle, request)
        self._publish_refused([request for _, request in group], FinishReason.ERROR, error)

    def _publish_refused(
        self, requests: Sequence[Request], reason: FinishReason, error: ServiceError | None = None
    ) -> None:
        for request in requests:
            request.status = RequestStatus.FINISHED
            request.finished_ns = self.clock.now_ns()
        self._publish_finished(
            [FinishedRequest(request, reason, error=error) for request in requests]
        )

    def _abort(self, outbox: Outbox, client_handles: Iterable[int]) -> None:
        live = outbox.handles
        self._end([live[handle] for handle in client_handles if handle in live])

    def _detach(self, outbox: Outbox) -> None:
        self._end(self.clients.close(outbox))

    def _end(self, handles: Iterable[int]) -> int:
        """Aborts requests by the engine's handles; returns how many were live."""
        if self.scheduler is None:
            return 0
        finished = [done for handle in handles if (done := self.scheduler.abort(handle))]
        self._publish_finished(finished)
        return len(finished)

    def _abort_all(self) -> int:
        return self._end(list(self.scheduler.requests)) if self.scheduler is not None else 0

    def _begin_drain(self) -> None:
        self._draining = True
        self._on_state_change()

    def _stop(self) -> None:
        self._stopping = True
        self.clients.close_all(UnavailableError("the enginecore is shutting down"))

    # ---- answers

    def _publish_finished(self, finished: Sequence[FinishedRequest]) -> None:
        self._publish([EngineCoreOutput(done.request, finished=done) for done in finished])

    def _publish(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self.clients.publish(outputs)
        if self.scheduler is None or not self.scheduler.requests:
            self._empty.set()
        else:
            self._empty.clear()

    # ---- workers

    async def _recover(self) -> None:
        """Puts all running requests back, attaches again."""
        assert self.scheduler is not None
        self.scheduler.forget_workers()
        self._set_state(EngineState.RECOVERING, "lost the worker; attaching again")
        await self._attach("lost the worker; attaching again")

    async def _attach(self, reason: str) -> None:
        """Makes the workers ready, however long it takes. Errors: what trying again cannot mend."""
        self.status_message = reason
        self.facts = await self._attend(asyncio.ensure_future(self._attach_with_backoff()))
        if self.scheduler is None:
            self.scheduler = self._make_scheduler(self.facts)
        self._set_state(EngineState.READY, "serving")

    async def _attach_with_backoff(self) -> EngineFacts:
        backoff = Backoff()
        while True:
            try:
                return await self._attach_once()
            except ServiceError as error:
                if error.code in _FATAL or self._never_started(error):
                    raise
                if error.message != self.status_message:
                    log.info("waiting for the worker: %s", error.message)
                self.status_message = error.message
            await asyncio.sleep(backoff.next_delay_s())

    def _never_started(self, error: ServiceError) -> bool:
        """Whether this is a fault of the first start: an answered fault would only come again."""
        return self.facts is None and error.code is ErrorCode.INTERNAL

    async def _attach_once(self) -> EngineFacts:
        workers = await self._executor.load(self._on_progress)
        if self.facts is None:
            facts = EngineFacts(workers.model, plan_kv_cache(workers, self.options.cache))
        elif workers.model == self.facts.model:
            # The scheduler's pool and the requests' lengths were made for this shape.
            facts = self.facts
        else:
            raise InvalidArgumentError("the worker came back with another model")
        await self._executor.initialize(facts.cache)
        return facts

    def _on_progress(self, ratio: float) -> None:
        self.load_progress_ratio = ratio
        self.status_message = f"loading the model: {ratio:.0%}"

    def _make_scheduler(self, facts: EngineFacts) -> Scheduler:
        cache = facts.cache
        kv_cache = KVCacheManager(
            cache.num_blocks, cache.block_size, cache.num_groups, self.options.enable_prefix_caching
        )
        config = replace(self.options.scheduler, max_model_len=cache.max_model_len)
        if not config.enable_chunked_prefill and (
            config.max_num_batched_tokens < config.max_model_len
        ):
            raise InvalidArgumentError(
                f"without chunked prefill max_num_batched_tokens "
                f"({config.max_num_batched_tokens}) must be at least max_model_len "
                f"({config.max_model_len})",
                param="max_num_batched_tokens",
            )
        return Scheduler(config, kv_cache, self.clock)

    def _set_state(self, state: EngineState, message: str) -> None:
        self._state, self.status_message = state, message
        log.info("engine is %s", state.value, extra={"status_message": message})
        self._on_state_change()

    def _fail(self, error: ServiceError) -> None:
        """Gives up: every live request gets its answer, nothing new is taken."""
        self._state, self.status_message = EngineState.FAILED, error.message
        if self.scheduler is not None:
            why = UnavailableError("the engine failed")
            handles = list(self.scheduler.requests)
            finished = [done for handle in handles if (done := self.scheduler.fail(handle, why))]
            self._publish_finished(finished)
        self._on_state_change()
        if not self.failure.done():
            self.failure.set_result(error)
