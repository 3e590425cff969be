"""Which request's time runs out next."""

import heapq
from collections.abc import Iterator, Mapping

from enginecore.request import Request


class DeadlineQueue:
    """The deadlines of live requests; requests without one cost nothing.

    Args:
        live: the live requests by handle. Entries of others are dropped when they come up.
    """

    def __init__(self, live: Mapping[int, Request]) -> None:
        self._live = live
        self._heap: list[tuple[int, int]] = []

    def add(self, request: Request) -> None:
        """Watches the request's deadline, if it has one."""
        if request.deadline_ns is not None:
            heapq.heappush(self._heap, (request.deadline_ns, request.handle))

    def next_ns(self) -> int | None:
        """The earliest deadline, in Unix nanoseconds; None when there is none."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now_ns: int) -> Iterator[Request]:
        """The live requests whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now_ns:
            request = self._live.get(heapq.heappop(self._heap)[1])
            if request is not None:
                yield request
