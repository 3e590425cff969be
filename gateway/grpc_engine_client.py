"""An engine over engine.v1: one multiplexed stream, which is rebuilt when it breaks.

    poll task     GetEngineInfo, until READY and then on: facts, state, last sign of life
    session task  Connect: hello -> welcome -> every live request again (with its tokens so far)
                  -> read news until the stream breaks -> back off -> Connect
    writer task   one per session: what `submit` and `abort` put into the outbox

While the stream is away live requests wait, and new ones join them: their clients see a pause.
After `unavailable_timeout_s` of that they end with UNAVAILABLE. All runs in one loop; no locks.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import grpc

from gateway.engine_client import Availability, EngineInfo, RequestGroup, SchedulerStats
from gateway.engine_messages import (
    abort_message,
    add_message,
    finished_from_proto,
    info_from_proto,
    scheduler_stats_from_proto,
)
from gateway.live_requests import LiveRequest, LiveRequests
from gateway.request import EngineRequest
from seamline.engine.v1 import engine_pb2, engine_pb2_grpc
from services.channel import Backoff, open_channel
from services.errors import UnavailableError

log = logging.getLogger(__name__)

POLL_STARTING_S: Final = 0.1
POLL_SERVING_S: Final = 2.0
POLL_TIMEOUT_S: Final = 5.0
RETRY_REPLAY_S: Final = 0.2
"""Wait before a replayed request that was refused is offered again."""
_SERVING: Final = (engine_pb2.ENGINE_STATE_READY, engine_pb2.ENGINE_STATE_RECOVERING)
_STATE_NAMES: Final[dict[int, str]] = {
    value: name.removeprefix("ENGINE_STATE_").lower()
    for name, value in engine_pb2.EngineState.items()
}


def _is_own_cancel() -> bool:
    """Whether this task is being cancelled; grpc raises the same when the peer cancels a call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class GrpcEngineClient:
    """See `EngineClient`. `start` begins, `close` ends.

    Args:
        address: of the enginecore.
        unavailable_timeout_s: how long requests wait for an engine that is away.
    """

    def __init__(self, address: str, unavailable_timeout_s: float) -> None:
        self._address = address
        self._timeout_s = unavailable_timeout_s
        self._channel = open_channel(address)
        self._stub: engine_pb2_grpc.EngineServiceAsyncStub = engine_pb2_grpc.EngineServiceStub(
            self._channel
        )
        self._live = LiveRequests()
        self._outbox: asyncio.Queue[engine_pb2.ConnectRequest] | None = None
        self._session_number = 0
        self._info: EngineInfo | None = None
        self._state: int = engine_pb2.ENGINE_STATE_UNSPECIFIED
        self._status_message = ""
        self._stats = SchedulerStats()
        self._serving = asyncio.Event()
        self._lost = asyncio.Event()
        self._last_seen = self._lost_at = time.monotonic()
        self._expiry: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient`."""
        return self._info

    @property
    def stats(self) -> SchedulerStats:
        """See `EngineClient`."""
        return self._stats

    @property
    def availability(self) -> Availability:
        """See `EngineClient`."""
        if self._state == engine_pb2.ENGINE_STATE_FAILED:
            return Availability(False, True, f"the engine failed: {self._status_message}")
        silent_s = time.monotonic() - self._last_seen
        if silent_s > self._timeout_s:
            return Availability(False, True, "the engine cannot be reached")
        if self._outbox is not None and self._state == engine_pb2.ENGINE_STATE_READY:
            return Availability(True, False)
        if self._outbox is None and (self._state in _SERVING or silent_s > POLL_SERVING_S):
            return Availability(False, False, "waiting for the engine to answer")
        state = _STATE_NAMES.get(self._state, "not known yet")
        return Availability(False, False, self._status_message or f"the engine is {state}")

    def start(self) -> None:
        """Begins to look for the engine; returns at once."""
        self._tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._connect())]

    async def close(self) -> None:
        """Ends the session; live requests end with UNAVAILABLE."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cancel_expiry()
        self._live.fail_all(UnavailableError("the gateway is stopping"))
        await self._channel.close()

    def submit(self, requests: Sequence[EngineRequest]) -> RequestGroup:
        """See `EngineClient`."""
        self._check_accepting()
        group, added = self._live.add(requests, self._abort)
        if self._outbox is not None:
            self._outbox.put_nowait(add_message(live.to_proto() for live in added))
        return group

    def _check_accepting(self) -> None:
        now = self.availability
        away_s = time.monotonic() - self._lost_at if self._outbox is None else 0.0
        if self._info is None or now.dead or away_s > self._timeout_s:
            raise UnavailableError(now.reason or "the engine is away")
        if self._state == engine_pb2.ENGINE_STATE_DRAINING:
            raise UnavailableError("the engine is draining")

    def _abort(self, live: Sequence[LiveRequest]) -> None:
        """Aborts requests; without a session nobody runs them, so that they end here."""
        if self._outbox is None:
            self._live.end_aborted()
        else:
            self._outbox.put_nowait(abort_message([request.handle for request in live]))

    async def _poll(self) -> None:
        while True:
            try:
                request = engine_pb2.GetEngineInfoRequest()
                message = await self._stub.GetEngineInfo(request, timeout=POLL_TIMEOUT_S)
                self._take_info(message)
            except grpc.aio.AioRpcError as error:
                self._serving.clear()
                log.debug("the engine at %s does not answer: %s", self._address, error.details())
            await self._wait_to_poll()

    async def _wait_to_poll(self) -> None:
        if self._outbox is None:
            await asyncio.sleep(POLL_STARTING_S)
            return
        # a lost stream ends the wait: the next engine may be there already
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), POLL_SERVING_S)

    def _take_info(self, message: engine_pb2.GetEngineInfoResponse) -> None:
        self._last_seen = time.monotonic()
        self._state, self._status_message = message.state, message.status_message
        if message.state in _SERVING:
            self._info = info_from_proto(message)
            self._serving.set()
        else:
            self._serving.clear()

    async def _connect(self) -> None:
        backoff = Backoff()
        while True:
            self._start_expiry()
            await self._serving.wait()
            try:
                await self._session(backoff)
                reason = "the engine closed it"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            except asyncio.InvalidStateError:
                reason = "it broke before the first message"
            except asyncio.CancelledError:
                if _is_own_cancel():
                    raise
                reason = "the engine cancelled it"
            # sessions wait for a fresh sign of life: the state that we know is the old one
            self._serving.clear()
            self._lost.set()
            self._live.end_aborted()
            log.warning("the engine's stream is away: %s", reason)
            await asyncio.sleep(backoff.next_delay_s())

    async def _session(self, backoff: Backoff) -> None:
        call = self._stub.Connect()
        hello = engine_pb2.Hello(gateway_id=uuid.uuid4().hex)
        helpers: list[asyncio.Task[Any]] = []
        try:
            await call.write(engine_pb2.ConnectRequest(hello=hello))
            welcome = await call.read()
            if not isinstance(welcome, engine_pb2.ConnectResponse):
                return
            log.info("connected to engine %s", welcome.welcome.engine_id)
            backoff.reset()
            self._begin()
            helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch())]
            while isinstance(message := await call.read(), engine_pb2.ConnectResponse):
                self._take(message.outputs)
        finally:
            if self._outbox is not None:
                self._lost_at = time.monotonic()
            self._outbox = None
            # the counters stay: the same engine may come back
            self._stats = replace(
                self._stats, num_running_reqs=0, num_waiting_reqs=0, kv_cache_usage_ratio=0.0
            )
            call.cancel()
            for helper in helpers:
                helper.cancel()

    def _begin(self) -> None:
        """Opens the outbox and replays the live requests, each group in one message."""
        self._outbox = asyncio.Queue()
        self._session_number += 1
        self._lost.clear()
        self._cancel_expiry()
        self._last_seen = time.monotonic()
        for group in self._live.replay():
            self._outbox.put_nowait(add_message(live.to_proto() for live in group))

    async def _write(self, call: Any) -> None:  # noqa: ANN401 - grpc's stub type is private
        outbox = self._outbox
        assert outbox is not None
        # a broken stream is the reader's to report
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await outbox.get())

    async def _watch(self) -> None:
        """Follows the load even while no request of ours moves."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = engine_pb2.WatchSchedulerRequest()
            async for message in self._stub.WatchScheduler(request):
                self._stats = scheduler_stats_from_proto(message.stats)

    def _take(self, outputs: engine_pb2.EngineCoreOutputs) -> None:
        self._last_seen = time.monotonic()
        if outputs.HasField("scheduler_stats"):
            self._stats = scheduler_stats_from_proto(outputs.scheduler_stats)
        finished = {f.handle: finished_from_proto(f) for f in outputs.finished}
        token_ids = list(outputs.new_token_ids)
        at = 0
        for handle, num_new in zip(outputs.handles, outputs.num_new_tokens, strict=True):
            new = token_ids[at : at + num_new]
            at += num_new
            self._live.progress(handle, new, finished.pop(handle, None))
        for handle, end in finished.items():
            if self._live.must_retry(handle, end):
                loop = asyncio.get_running_loop()
                loop.call_later(RETRY_REPLAY_S, self._offer_again, handle, self._session_number)
            else:
                self._live.progress(handle, [], end)

    def _offer_again(self, handle: int, session_number: int) -> None:
        live = self._live.get(handle)
        is_same = session_number == self._session_number  # a later session has replayed it already
        if live is not None and self._outbox is not None and is_same:
            self._outbox.put_nowait(add_message([live.to_proto()]))

    def _start_expiry(self) -> None:
        if self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self._timeout_s, self._expire)

    def _cancel_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        self._expiry = None
        self._live.fail_all(UnavailableError(self.availability.reason or "the engine is away"))
