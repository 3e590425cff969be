"""A gateway's session: one stream for all its requests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Final

from enginecore import client_wire, validation
from enginecore.engine import Engine
from enginecore.outbox import Outbox
from enginecore.scheduler_output import EngineCoreOutput
from enginecore.stats import SchedulerStats
from seamline.engine.v1 import engine_pb2
from services.errors import InvalidArgumentError, ServiceError

_STATS_INTERVAL_S: Final = 0.5
"""Routers compare engines by these; more often than they choose would be waste."""


class Session:
    """Both directions of a session. `listen` runs beside `responses`; their owner detaches."""

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox
        self._live: set[int] = set()
        self._half_closed = False
        self._stats_sent_s = 0.0
        self._last_stats: SchedulerStats | None = None

    # ---- upwards

    async def listen(self, messages: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
        """Takes the gateway's messages until it has no more; a malformed one ends the session."""
        try:
            async for message in messages:
                await self._outbox.wait_for_room()
                self._take(message)
        except ServiceError as error:
            self._outbox.close(error)
        else:
            self._half_closed = True
            self._outbox.wake()

    def _take(self, message: engine_pb2.ConnectRequest) -> None:
        payload = message.WhichOneof("payload")
        if payload == "add":
            self._add(message.add.requests)
        elif payload == "abort":
            self._engine.abort(self._outbox, list(message.abort.handles))
        elif payload == "hello":
            raise InvalidArgumentError("hello comes once", param="hello")
        else:
            raise InvalidArgumentError("the message has no payload", param="payload")

    def _add(self, messages: Sequence[engine_pb2.SessionRequest]) -> None:
        """Queues a group, or refuses all of it when one of it is not valid."""
        if not messages:
            raise InvalidArgumentError("requests is empty", param="requests")
        for message in messages:
            if message.handle == 0 or message.handle in self._live:
                raise InvalidArgumentError(
                    f"handle {message.handle} is 0 or in use", param="handle"
                )
            self._live.add(message.handle)
        engine = self._engine
        facts = engine.facts
        assert facts is not None
        try:
            error = None
            for message in messages:
                validation.check_request(message.request, facts)
        except ServiceError as fault:
            error = fault
        group = [
            (message.handle, client_wire.receive_request(engine, message.request, facts))
            for message in messages
        ]
        if error is None:
            engine.submit(self._outbox, group)
        else:
            engine.refuse(self._outbox, group, error)

    # ---- downwards

    async def responses(self) -> AsyncGenerator[engine_pb2.ConnectResponse]:
        """The session's news, until the gateway has closed its side and every request ended."""
        while self._live or not self._half_closed:
            try:
                async with asyncio.timeout(_STATS_INTERVAL_S):
                    outputs = await self._outbox.take()
            except TimeoutError:
                outputs = {}
            stats = self._due_stats()
            if outputs or stats is not None:
                yield self._response(outputs, stats)

    def _response(
        self, outputs: dict[int, EngineCoreOutput], stats: SchedulerStats | None
    ) -> engine_pb2.ConnectResponse:
        engine = self._engine
        message = client_wire.outputs_to_proto(outputs, engine.epoch, engine.last_step)
        if stats is not None:
            message.scheduler_stats.CopyFrom(client_wire.stats_to_proto(stats))
        self._live.difference_update(finished.handle for finished in message.finished)
        return engine_pb2.ConnectResponse(outputs=message)

    def _due_stats(self) -> SchedulerStats | None:
        """The scheduler's state, when it is time to tell it and it changed."""
        now_s = asyncio.get_running_loop().time()
        scheduler = self._engine.scheduler
        if scheduler is None or now_s - self._stats_sent_s < _STATS_INTERVAL_S:
            return None
        self._stats_sent_s = now_s
        stats = scheduler.stats()
        if stats == self._last_stats and not scheduler.requests:
            return None
        self._last_stats = stats
        return stats
