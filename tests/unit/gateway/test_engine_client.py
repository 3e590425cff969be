import asyncio
from collections.abc import Sequence

from gateway.engine_client import RequestGroup
from gateway.request import EngineDelta, Finished, FinishReason

LENGTH = Finished(FinishReason.LENGTH)


def _group(size: int) -> tuple[RequestGroup, list[list[int]]]:
    aborts: list[list[int]] = []

    def abort(indices: Sequence[int]) -> None:
        aborts.append(list(indices))

    return RequestGroup(size, abort), aborts


async def test_a_lagging_reader_finds_deltas_merged_c8() -> None:
    """C8: tokens are extended, the end wins, one delta per request however far it lags."""
    group, _ = _group(2)
    for token in range(1000):
        group.put(EngineDelta(0, [token]))
    group.put(EngineDelta(1, [7]))
    group.put(EngineDelta(0, [1000], LENGTH))
    news = await group.next()
    assert [(d.index, d.finished) for d in news] == [(0, LENGTH), (1, None)]
    assert news[0].token_ids == list(range(1001))
    assert group.num_unread == 1


async def test_next_waits_for_news() -> None:
    group, _ = _group(1)
    waiting = asyncio.create_task(group.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    group.put(EngineDelta(0, [1]))
    assert (await waiting)[0].token_ids == [1]


async def test_only_open_requests_are_aborted() -> None:
    group, aborts = _group(3)
    group.put(EngineDelta(1, [], LENGTH))
    await group.next()
    group.abort([1, 2])
    group.abort()
    assert aborts == [[2], [0, 2]]
