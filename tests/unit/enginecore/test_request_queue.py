import pytest

from enginecore.request_queue import FcfsQueue, PriorityQueue, RequestQueue, make_request_queue
from tests.unit.enginecore.builders import make_request


def drained(queue: RequestQueue) -> list[int]:
    order = []
    while queue:
        request = queue.peek()
        queue.remove(request)
        order.append(request.handle)
    return order


def test_policies_by_name() -> None:
    assert isinstance(make_request_queue("fcfs"), FcfsQueue)
    assert isinstance(make_request_queue("priority"), PriorityQueue)


def test_fcfs_puts_the_preempted_first() -> None:
    queue = FcfsQueue()
    requests = [make_request(handle) for handle in (1, 2, 3, 4)]
    for request in requests[:3]:
        queue.add(request)
    queue.put_back(requests[3])
    queue.remove(requests[1])
    assert [request.handle for request in queue] == [4, 1, 3]
    assert drained(queue) == [4, 1, 3]


def test_priority_orders_by_value_then_arrival_and_forgets_the_removed_a9() -> None:
    """A9"""
    queue = PriorityQueue()
    keys = [(1, 5), (0, 9), (1, 4), (0, 3), (2, 1)]
    requests = [
        make_request(handle, priority=priority, arrival_ns=arrival)
        for handle, (priority, arrival) in enumerate(keys)
    ]
    for request in requests:
        queue.add(request)
    queue.remove(requests[3])
    queue.remove(requests[0])
    assert len(queue) == 3
    assert [request.handle for request in queue] == [1, 2, 4]
    queue.put_back(requests[0])
    assert drained(queue) == [1, 2, 0, 4]


@pytest.mark.parametrize("queue", [FcfsQueue(), PriorityQueue()])
def test_empty_queue_has_no_next(queue: RequestQueue) -> None:
    with pytest.raises(IndexError):
        queue.peek()


def test_victims_a9() -> None:
    """A9: the last that joined, or the highest key."""
    running = [
        make_request(1, priority=1, arrival_ns=7),
        make_request(2, priority=1, arrival_ns=9),
        make_request(3, priority=0, arrival_ns=10),
    ]
    assert FcfsQueue().choose_victim(running) is running[2]
    assert PriorityQueue().choose_victim(running) is running[1]
