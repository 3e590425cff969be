"""The requests that an engine has not finished, with all it takes to start them anew elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from gateway.engine_client import RequestGroup
from gateway.engine_messages import request_to_proto
from gateway.request import EngineDelta, EngineRequest, Finished, FinishReason
from seamline.engine.v1 import engine_pb2
from services.errors import ErrorCode, ServiceError

MAX_HANDLE: Final = 2**32 - 1
MAX_REPLAY_RETRIES: Final = 100
_RETRYABLE: Final = (
    # the engine has not noticed yet that the previous stream is gone
    ErrorCode.ALREADY_EXISTS,
    ErrorCode.UNAVAILABLE,
    # it was admitted once already
    ErrorCode.RESOURCE_EXHAUSTED,
)


@dataclass(slots=True)
class LiveRequest:
    """One request at an engine.

    Attributes:
        handle: stands for it on the stream.
        group: whose reader gets its news, as request `index`.
        output_ids: tokens that came so far; a replay resumes after them.
        deadline: monotonic seconds, if it has one.
        was_sent: an engine was offered it.
        is_replay: offered again after a lost stream, and nothing came since.
    """

    handle: int
    request: EngineRequest
    group: RequestGroup
    index: int
    deadline: float | None
    output_ids: list[int] = field(default_factory=list)
    is_aborted: bool = False
    was_sent: bool = False
    is_replay: bool = False
    num_retries: int = 0

    def to_proto(self) -> tuple[int, engine_pb2.EngineCoreRequest]:
        """The handle and the request as it stands now, to be sent."""
        self.was_sent = True
        timeout_ms = None
        if self.deadline is not None:
            timeout_ms = max(1, int((self.deadline - time.monotonic()) * 1000))
        return self.handle, request_to_proto(self.request, self.output_ids, timeout_ms)


def _deadline(timeout_ms: int | None) -> float | None:
    return None if timeout_ms is None else time.monotonic() + timeout_ms / 1000


class LiveRequests:
    """The table of live requests by handle."""

    def __init__(self) -> None:
        self._by_handle: dict[int, LiveRequest] = {}
        self._last_handle = 0

    def get(self, handle: int) -> LiveRequest | None:
        """The request, unless it is over."""
        return self._by_handle.get(handle)

    def add(
        self, requests: Sequence[EngineRequest], abort: Callable[[Sequence[LiveRequest]], None]
    ) -> tuple[RequestGroup, list[LiveRequest]]:
        """Adds requests as one group; `abort` is called with those that its reader gives up."""
        added: list[LiveRequest] = []

        def abort_indices(indices: Sequence[int]) -> None:
            chosen = [live for live in added if live.index in set(indices) and not live.is_aborted]
            for live in chosen:
                live.is_aborted = True
            still = [live for live in chosen if live.handle in self._by_handle]
            if still:
                abort(still)

        group = RequestGroup(len(requests), abort_indices)
        for index, request in enumerate(requests):
            live = LiveRequest(
                self._next_handle(), request, group, index, _deadline(request.timeout_ms)
            )
            self._by_handle[live.handle] = live
            added.append(live)
        return group, added

    def progress(self, handle: int, new: list[int], finished: Finished | None) -> None:
        """Passes news on; news of a request that is over is dropped."""
        live = self._by_handle.get(handle)
        if live is None:
            return
        live.output_ids.extend(new)
        live.is_replay = False
        if finished is not None:
            del self._by_handle[handle]
        live.group.put(EngineDelta(live.index, new, finished))

    def replay(self) -> Iterator[list[LiveRequest]]:
        """Marks all as replays and gives them in the groups in which they came."""
        lives = list(self._by_handle.values())
        for live in lives:
            live.is_replay, live.num_retries = live.was_sent, 0
        for _, group in groupby(lives, key=lambda live: id(live.group)):
            yield list(group)

    def must_retry(self, handle: int, finished: Finished) -> bool:
        """Whether this end is only a new engine's refusal of an admitted request."""
        live = self._by_handle.get(handle)
        if live is None or finished.error is None or not live.is_replay or live.is_aborted:
            return False
        live.num_retries += 1
        return finished.error.code in _RETRYABLE and live.num_retries <= MAX_REPLAY_RETRIES

    def end_aborted(self) -> None:
        """Ends those that their readers gave up; for when no engine runs them any more."""
        for live in [live for live in self._by_handle.values() if live.is_aborted]:
            self.progress(live.handle, [], Finished(FinishReason.ABORT))

    def fail_all(self, error: ServiceError) -> None:
        """Ends all with an error."""
        for handle in list(self._by_handle):
            self.progress(handle, [], Finished(FinishReason.ERROR, error=error))

    def _next_handle(self) -> int:
        while True:
            self._last_handle = self._last_handle % MAX_HANDLE + 1
            if self._last_handle not in self._by_handle:
                return self._last_handle
