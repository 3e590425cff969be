import pytest

from gateway.live_requests import MAX_HANDLE, LiveRequest, LiveRequests
from gateway.request import EngineRequest, Finished, FinishReason, SamplingParams
from services.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)


def _request(name: str, timeout_ms: int | None = None) -> EngineRequest:
    return EngineRequest(name, [5, 6], SamplingParams(max_tokens=9, seed=4), timeout_ms=timeout_ms)


def _add(live: LiveRequests, *names: str) -> list[LiveRequest]:
    _, added = live.add([_request(name) for name in names], lambda requests: None)
    for request in added:
        request.to_proto()
    return added


def _refused(error: ServiceError) -> Finished:
    return Finished(FinishReason.ERROR, error=error)


def test_a_replay_has_the_tokens_so_far_and_keeps_groups() -> None:
    """Law 1: prompt, tokens and seed are all an engine needs."""
    live = LiveRequests()
    first, _ = _add(live, "a-0", "a-1")
    (other,) = _add(live, "b")
    live.progress(first.handle, [1, 2], None)
    live.progress(first.handle, [3], None)
    live.progress(other.handle, [9], Finished(FinishReason.LENGTH))
    groups = [[request.to_proto() for request in group] for group in live.replay()]
    assert [[message.request_id for _, message in group] for group in groups] == [["a-0", "a-1"]]
    message = groups[0][0][1]
    assert list(message.prompt_token_ids) == [5, 6]
    assert list(message.output_token_ids) == [1, 2, 3]
    assert message.sampling_params.seed == 4


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (AlreadyExistsError("x"), True),
        (UnavailableError("x"), True),
        (ResourceExhaustedError("x"), True),
        (InvalidArgumentError("x"), False),
    ],
)
def test_a_refused_replay_is_offered_again(error: ServiceError, again: bool) -> None:
    """It was admitted once; a new engine's limits do not undo that."""
    live = LiveRequests()
    (request,) = _add(live, "a")
    assert not live.must_retry(request.handle, _refused(error)), "a first refusal is an answer"
    list(live.replay())
    assert live.must_retry(request.handle, _refused(error)) == again
    live.progress(request.handle, [1], None)
    assert not live.must_retry(request.handle, _refused(error)), "it ran again"


def test_retries_end() -> None:
    live = LiveRequests()
    (request,) = _add(live, "a")
    list(live.replay())
    refused = _refused(UnavailableError("x"))
    tries = 0
    while live.must_retry(request.handle, refused):
        tries += 1
        assert tries < 1000


async def test_an_abort_without_an_engine_ends_at_once() -> None:
    live = LiveRequests()
    group, _ = live.add([_request("a"), _request("b")], lambda requests: live.end_aborted())
    group.abort([0])
    news = await group.next()
    assert [(d.index, d.finished and d.finished.reason) for d in news] == [(0, FinishReason.ABORT)]
    assert [[r.request.request_id for r in g] for g in live.replay()] == [["b"]]


async def test_all_end_when_the_engine_stays_away() -> None:
    live = LiveRequests()
    group, _ = live.add([_request("a"), _request("b")], lambda requests: None)
    live.fail_all(UnavailableError("away"))
    assert [d.finished and str(d.finished.error) for d in await group.next()] == ["away"] * 2
    assert list(live.replay()) == []


def test_handles_are_unique_and_wrap() -> None:
    live = LiveRequests()
    (first,) = _add(live, "a")
    assert first.handle == 1
    live._last_handle = MAX_HANDLE - 1
    handles = [request.handle for request in _add(live, "b", "c")]
    assert handles == [MAX_HANDLE, 2], "0 is no handle and 1 is in use"


def test_the_deadline_shrinks_with_time() -> None:
    live = LiveRequests()
    _, (request,) = live.add([_request("a", timeout_ms=10_000)], lambda requests: None)
    assert 9_000 < request.to_proto()[1].timeout_ms <= 10_000
