"""The order in which waiting requests are taken."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from enginecore.request import Request


class RequestQueue(Protocol):
    """A scheduling policy: who is next, and who gives way when blocks run out.

    All operations but iteration cost at most the logarithm of the queue's length.
    """

    def add(self, request: Request) -> None:
        """Puts a new request in its place."""

    def put_back(self, request: Request) -> None:
        """Puts a preempted request where it is taken again before those that arrived after it."""

    def peek(self) -> Request:
        """The next request. Raises IndexError when empty."""

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The running request to preempt; `running` is not empty and in the order of joining."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served; the priority value is ignored."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Puts a new request at the end."""
        self._requests[request.handle] = request

    def put_back(self, request: Request) -> None:
        """Puts a preempted request at the head."""
        self._requests[request.handle] = request
        self._requests.move_to_end(request.handle, last=False)

    def peek(self) -> Request:
        """The request at the head."""
        if not self._requests:
            raise IndexError("no request waits")
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        del self._requests[request.handle]

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The one that joined last."""
        return running[-1]


PriorityKey = tuple[int, int, int]


def priority_key(request: Request) -> PriorityKey:
    """Sorts by priority value, lower first, then by arrival."""
    return request.priority, request.arrival_ns, request.handle


class PriorityQueue:
    """Lower priority value first; among equals, earlier arrival."""

    def __init__(self) -> None:
        self._heap: list[PriorityKey] = []
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=priority_key))

    def add(self, request: Request) -> None:
        """Puts a request in its place."""
        self._requests[request.handle] = request
        heapq.heappush(self._heap, priority_key(request))

    def put_back(self, request: Request) -> None:
        """Puts a preempted request in its place, which its key alone decides."""
        self.add(request)

    def peek(self) -> Request:
        """The request with the lowest key."""
        while self._heap:
            request = self._requests.get(self._heap[0][2])
            if request is not None:
                return request
            # Left behind by `remove`, which does not search the heap.
            heapq.heappop(self._heap)
        raise IndexError("no request waits")

    def remove(self, request: Request) -> None:
        """Takes a request out; its place in the heap is cleared when it comes up."""
        del self._requests[request.handle]
        if self._heap and self._heap[0][2] == request.handle:
            heapq.heappop(self._heap)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The one with the highest key."""
        return max(running, key=priority_key)


def make_request_queue(policy: str) -> RequestQueue:
    """The queue of a `scheduling_policy`: "fcfs" or "priority"."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
