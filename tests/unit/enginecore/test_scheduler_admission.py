import pytest

from enginecore.admission import AdmissionLimits
from enginecore.request import FinishReason
from services.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from tests.unit.enginecore.builders import (
    EOS,
    ManualClock,
    assert_nothing_left,
    make_request,
    make_scheduler,
    run_step,
)


def test_admission_is_all_or_nothing_and_counted_once_a16() -> None:
    """A16: limit 10 with 8 unfinished refuses three and takes two."""
    scheduler = make_scheduler(limits=AdmissionLimits(max_num_queued_reqs=10))
    scheduler.add_requests([make_request(i) for i in range(1, 9)])
    with pytest.raises(ResourceExhaustedError):
        scheduler.add_requests([make_request(i) for i in (11, 12, 13)])
    assert scheduler.counters.num_rejected_reqs == 1
    assert len(scheduler.requests) == 8
    scheduler.add_requests([make_request(i) for i in (11, 12)])
    assert len(scheduler.requests) == 10


def test_two_groups_for_one_place_a16() -> None:
    """A16: limit 3, groups of one and three: exactly one wins."""
    scheduler = make_scheduler(limits=AdmissionLimits(max_num_queued_reqs=3))
    scheduler.add_requests([make_request(1)])
    with pytest.raises(ResourceExhaustedError):
        scheduler.add_requests([make_request(i) for i in (2, 3, 4)])
    assert list(scheduler.requests) == [1]
    scheduler.abort(1)
    scheduler.add_requests([make_request(i) for i in (2, 3, 4)])
    assert len(scheduler.requests) == 3


def test_queued_tokens_are_bounded_a16() -> None:
    """A16"""
    scheduler = make_scheduler(limits=AdmissionLimits(max_num_queued_tokens=100))
    scheduler.add_requests([make_request(1, 60)])
    with pytest.raises(ResourceExhaustedError):
        scheduler.add_requests([make_request(2, 41)])
    scheduler.add_requests([make_request(3, 40)])
    scheduler.abort(1)
    scheduler.add_requests([make_request(4, 60)])


def test_live_id_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(1)])
    twin = make_request(2)
    twin.request_id = "request-1"
    with pytest.raises(AlreadyExistsError, match="request-1"):
        scheduler.add_requests([twin])


@pytest.mark.parametrize("num_blocks", [5, 1000])
def test_prompt_that_never_fits_is_refused_with_both_lengths(num_blocks: int) -> None:
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=64)
    with pytest.raises(InvalidArgumentError, match=r"prompt_token_ids has 64 .* 64 tokens") as info:
        scheduler.add_requests([make_request(1, 10), make_request(2, 64)])
    assert info.value.param == "prompt_token_ids"
    assert not scheduler.requests
    scheduler.add_requests([make_request(3, 63)])
    _, (output,) = run_step(scheduler)
    assert output.finished is not None
    assert output.finished.finish_reason is FinishReason.LENGTH


def test_sequence_never_outgrows_the_pool() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=8192)
    request = make_request(1, 40, max_tokens=None)
    scheduler.add_requests([request])
    for _ in range(100):
        if not scheduler.requests:
            break
        run_step(scheduler)
    assert request.num_tokens == 48
    assert request.num_preemptions == 0
    assert_nothing_left(scheduler)


def test_expired_requests_never_run_and_running_ones_stop() -> None:
    clock = ManualClock()
    scheduler = make_scheduler(clock=clock, max_num_seqs=1)
    running, waiting = make_request(1, deadline_ns=5_000), make_request(2, deadline_ns=4_000)
    scheduler.add_requests([running, waiting, make_request(3)])
    run_step(scheduler)
    assert scheduler.next_deadline_ns() == 4_000
    assert scheduler.expire() == []
    clock.time_ns = 4_000
    (finished,) = scheduler.expire()
    assert finished.request is waiting
    assert isinstance(finished.error, DeadlineExceededError)
    clock.time_ns = 6_000
    (finished,) = scheduler.expire()
    assert finished.request is running
    assert finished.num_freed_blocks == 1
    output, _ = run_step(scheduler)
    assert output.finished_handles == [1]
    assert [new.handle for new in output.scheduled_new_reqs] == [3]
    assert scheduler.next_deadline_ns() is None


def test_resumed_request_goes_on_after_its_tokens() -> None:
    scheduler = make_scheduler()
    request = make_request(1, 10, max_tokens=4, output_token_ids=[5, 6])
    assert scheduler.add_requests([request]) == []
    output, (first,) = run_step(scheduler, {1: [7]})
    assert output.scheduled_new_reqs[0].num_scheduled_tokens == 12
    assert first.new_token_ids == [7]
    _, (second,) = run_step(scheduler, {1: [8]})
    assert second.finished is not None
    assert request.output_token_ids == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("tokens", "reason"), [([5, EOS], FinishReason.STOP), ([5, 6, 7, 8], FinishReason.LENGTH)]
)
def test_resumed_request_that_had_ended_ends_at_once(
    tokens: list[int], reason: FinishReason
) -> None:
    scheduler = make_scheduler()
    request = make_request(1, 10, max_tokens=4, output_token_ids=tokens)
    (finished,) = scheduler.add_requests([request])
    assert finished.finish_reason is reason
    assert_nothing_left(scheduler)
    assert not scheduler.has_work
