"""What the gateway needs of an engine. Pure of protobuf; `grpc_engine_client` is the real one."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.request import EngineDelta, EngineRequest


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """What an engine serves.

    Attributes:
        max_model_len: longest sequence in tokens, prompt and output together.
        vocab_size: token ids are below this.
    """

    engine_id: str
    model: str
    max_model_len: int
    vocab_size: int


@dataclass(slots=True, frozen=True)
class SchedulerStats:
    """The engine's load; counters grow from its start."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage_ratio: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


@dataclass(slots=True, frozen=True)
class Availability:
    """Whether the engine can be used.

    Attributes:
        ready: new requests are served.
        dead: it has been away for longer than requests wait for it, or says that it failed.
        reason: for people; empty when ready.
    """

    ready: bool
    dead: bool
    reason: str = ""


class RequestGroup:
    """News of requests that were submitted together.

    It holds at most one delta per request: a reader that lags finds them merged. One task reads;
    the engine's client writes, in the same loop.

    Args:
        abort: asks the engine to abort requests by their index; called at most once per index.
        num_requests: indices are below this.
    """

    def __init__(self, num_requests: int, abort: Callable[[Sequence[int]], None]) -> None:
        self._abort = abort
        self._open = set(range(num_requests))
        self._pending: dict[int, EngineDelta] = {}
        self._arrived = asyncio.Event()

    @property
    def num_unread(self) -> int:
        """Requests whose final delta was not read yet."""
        return len(self._open)

    def put(self, delta: EngineDelta) -> None:
        """Adds news of one request."""
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
        else:
            waiting.merge(delta)
        self._arrived.set()

    async def next(self) -> list[EngineDelta]:
        """The news since the last call, at least one delta; waits for it."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._pending = self._pending, {}
        self._open.difference_update(i for i, delta in news.items() if delta.finished)
        return list(news.values())

    def abort(self, indices: Sequence[int] | None = None) -> None:
        """Ends requests early (unset: all); each still gets its final delta."""
        chosen = sorted(self._open if indices is None else self._open.intersection(indices))
        if chosen:
            self._abort(chosen)


class EngineClient(Protocol):
    """An engine, as the gateway sees it."""

    @property
    def info(self) -> EngineInfo | None:
        """Its facts; None until it was ready once."""

    @property
    def availability(self) -> Availability:
        """Whether it can be used now."""

    @property
    def stats(self) -> SchedulerStats:
        """Its load, as last heard."""

    def submit(self, requests: Sequence[EngineRequest]) -> RequestGroup:
        """Sends requests, admitted all or none. Each gets exactly one final delta.

        Errors: UnavailableError at once when the engine is not there to take them; an engine's
        refusal comes as the final delta's error.
        """
