import pytest

from enginecore.request import RequestStatus
from enginecore.scheduler_output import ModelRunnerOutput
from tests.unit.enginecore.builders import (
    assert_nothing_left,
    counts,
    make_request,
    make_scheduler,
    run_step,
)


def test_last_running_gives_way_when_blocks_run_out_a7() -> None:
    """A7: and its token under way is still appended."""
    scheduler = make_scheduler(num_blocks=11, prefix_caching=False)
    first, second = make_request(1, 80), make_request(2, 80)
    scheduler.add_requests([first])
    step_one = scheduler.schedule()
    scheduler.add_requests([second])
    step_two = scheduler.schedule()
    assert counts(step_two) == [80]
    scheduler.update_from_output(step_one, ModelRunnerOutput(1, [1], [1], [0]))
    step_three = scheduler.schedule()
    assert step_three.preempted_handles == [2]
    assert counts(step_three) == [1]
    assert scheduler.running == [first]
    assert scheduler.waiting.peek() is second
    assert second.status is RequestStatus.PREEMPTED
    assert second.num_preemptions == 1
    (output,) = scheduler.update_from_output(step_two, ModelRunnerOutput(2, [2], [1], [42]))
    assert output.new_token_ids == [42]
    assert second.output_token_ids == [42]


def test_resumed_request_is_sent_in_full_a8() -> None:
    """A8: 30 prompt and 2 output tokens are all there, none again and none lost."""
    scheduler = make_scheduler(num_blocks=6, prefix_caching=False)
    first, second = make_request(1, 30), make_request(2, 30)
    scheduler.add_requests([first, second])
    delivered: list[int] = []
    resumed = None
    for token_id in range(100, 120):
        output, results = run_step(scheduler, {1: [token_id], 2: [token_id]})
        delivered += [t for r in results if r.request is second for t in r.new_token_ids]
        for new in output.scheduled_new_reqs:
            if new.resumed:
                resumed = new
                assert counts(output)[-1] == 33
    assert resumed is not None
    assert resumed.handle == 2
    assert resumed.prompt_token_ids == [2] * 30
    assert resumed.output_token_ids == delivered[:3]
    assert resumed.num_computed_tokens == 0
    assert len(resumed.block_ids[0]) == 3
    assert second.output_token_ids == delivered


def test_preempted_request_hits_its_own_blocks() -> None:
    scheduler = make_scheduler(num_blocks=11)
    scheduler.add_requests([make_request(1, 80, max_tokens=2), make_request(2, 79)])
    run_step(scheduler)
    output, _ = run_step(scheduler)
    assert output.preempted_handles == [2]
    output, _ = run_step(scheduler)
    (new,) = output.scheduled_new_reqs
    assert (new.resumed, new.num_computed_tokens, new.num_scheduled_tokens) == (True, 64, 16)
    assert scheduler.counters.preempted_prefix_cache_hits == 64
    assert scheduler.counters.prefix_cache_hits == 0


PRIORITIES = [
    # (priority, arrival) of requests 1, 2, ...; the order in which they join
    ([(0, 1), (1, 2), (2, 3)], [1, 2, 3]),
    ([(2, 1), (1, 2), (0, 3)], [3, 2, 1]),
    ([(1, 3), (1, 2), (1, 1)], [3, 2, 1]),
    ([(1, 3), (0, 2), (1, 1), (0, 4)], [2, 4, 3, 1]),
]


@pytest.mark.parametrize(("keys", "order"), PRIORITIES)
def test_priority_then_arrival_a9(keys: list[tuple[int, int]], order: list[int]) -> None:
    """A9"""
    requests = [
        make_request(i, 10, priority=priority, arrival_ns=arrival)
        for i, (priority, arrival) in enumerate(keys, 1)
    ]
    scheduler = make_scheduler(scheduling_policy="priority")
    scheduler.add_requests(requests)
    assert [new.handle for new in scheduler.schedule().scheduled_new_reqs] == order
    fcfs = make_scheduler()
    fcfs.add_requests([make_request(r.handle, 10, priority=r.priority) for r in requests])
    joined = [new.handle for new in fcfs.schedule().scheduled_new_reqs]
    assert joined == sorted(joined)


def test_worst_priority_gives_way_even_if_already_scheduled_a9() -> None:
    """A9: a request earlier in the batch is taken back out of the step, budget and blocks too."""
    scheduler = make_scheduler(
        num_blocks=7, prefix_caching=False, scheduling_policy="priority", max_num_batched_tokens=64
    )
    worst, best = make_request(1, 31, priority=5), make_request(2, 48, priority=0)
    scheduler.add_requests([worst])
    run_step(scheduler)
    scheduler.add_requests([best])
    run_step(scheduler)
    # Now 1 needs a third block and takes the last; then 2 needs a fourth.
    output, _ = run_step(scheduler)
    assert output.preempted_handles == [1]
    assert output.scheduled_cached_reqs.handles == [2]
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_cached_reqs.num_new_blocks == [1]
    assert len(output.scheduled_cached_reqs.new_block_ids) == 1
    assert worst.num_computed_tokens == 0
    assert worst.output_token_ids == [0, 0]


def test_blocks_of_an_unscheduled_chunk_are_not_found_a9() -> None:
    """A9: what the step took back was never computed, so the victim itself must not hit it."""
    scheduler = make_scheduler(
        num_blocks=6, scheduling_policy="priority", long_prefill_token_threshold=32
    )
    worst, best = make_request(1, list(range(79)), priority=5), make_request(2, 16, priority=6)
    scheduler.add_requests([worst, best])
    run_step(scheduler)
    # Both run now, in this order; from here on the second one is the better.
    best.priority = 0
    # 1 gets 32 more tokens and the last two blocks; then 2 needs one.
    output, _ = run_step(scheduler)
    assert output.preempted_handles == [1]
    assert counts(output) == [1]
    scheduler.abort(2)
    output, _ = run_step(scheduler)
    (new,) = output.scheduled_new_reqs
    assert (new.handle, new.num_computed_tokens) == (1, 32)


def test_no_one_gives_way_while_blocks_last_a9() -> None:
    """A9"""
    scheduler = make_scheduler(scheduling_policy="priority", max_num_seqs=1)
    scheduler.add_requests([make_request(1, 10, priority=9)])
    run_step(scheduler)
    scheduler.add_requests([make_request(2, 10, priority=0)])
    output, _ = run_step(scheduler)
    assert output.preempted_handles == []
    assert output.scheduled_cached_reqs.handles == [1]
    assert scheduler.blocked_on == "a slot (max_num_seqs)"


def test_worker_never_holds_more_than_max_num_seqs_a14() -> None:
    """A14: forced preemption and resumption of the same handle in one message."""
    scheduler = make_scheduler(max_num_seqs=3, num_blocks=20)
    scheduler.add_requests([make_request(i, 40, max_tokens=4 + i) for i in range(1, 9)])
    held: set[int] = set()
    purged_and_added = 0
    for step in range(60):
        if step % 4 == 1:
            assert scheduler.reset_prefix_cache(preempt_running=True)
        output, _ = run_step(scheduler)
        new = {data.handle for data in output.scheduled_new_reqs}
        purged_and_added += len(new & set(output.preempted_handles))
        held -= {*output.finished_handles, *output.preempted_handles}
        assert held.isdisjoint(new)
        held |= new
        assert held.issuperset(output.scheduled_cached_reqs.handles)
        assert len(held) <= 3
    assert purged_and_added > 5
    assert held == set()
    assert_nothing_left(scheduler)


def test_reset_with_running_sends_preempted_and_new_at_once_a14_b6() -> None:
    """A14, B6: the running requests go back in order and the reset succeeds."""
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(i, 40) for i in (1, 2, 3)])
    run_step(scheduler)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(preempt_running=True)
    assert [request.handle for request in scheduler.waiting] == [1, 2, 3]
    output, _ = run_step(scheduler)
    assert sorted(output.preempted_handles) == [1, 2, 3]
    assert [(new.handle, new.resumed) for new in output.scheduled_new_reqs] == [
        (1, True),
        (2, True),
        (3, True),
    ]
    assert [new.num_scheduled_tokens for new in output.scheduled_new_reqs] == [41, 41, 41]


def test_forgetting_the_workers_keeps_the_requests_in_order() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    scheduler.add_requests([make_request(i, 40) for i in (1, 2, 3)])
    run_step(scheduler)
    scheduler.schedule()
    scheduler.abort(1)
    scheduler.forget_workers()
    output = scheduler.schedule()
    assert (output.finished_handles, output.preempted_handles) == ([], [])
    assert [(new.handle, new.num_scheduled_tokens) for new in output.scheduled_new_reqs] == [
        (2, 41),
        (3, 40),
    ]
