import pytest

from enginecore.admission import AdmissionLimits
from enginecore.request import FinishReason, RequestStatus
from enginecore.scheduler_output import Logprobs, ModelRunnerOutput
from services.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from tests.unit.enginecore.builders import (
    EOS,
    ManualClock,
    assert_nothing_left,
    counts,
    make_request,
    make_scheduler,
    result_of,
    run_step,
)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_requests_that_fit_join_in_order_a1(prefix_caching: bool, prompt_logprobs: bool) -> None:
    """A1"""
    scheduler = make_scheduler(prefix_caching=prefix_caching)
    prompt = list(range(100))
    requests = [
        make_request(i, list(prompt), skip_reading_prefix_cache=prompt_logprobs)
        for i in range(1, 11)
    ]
    if not prompt_logprobs:
        requests = [make_request(i, 100) for i in range(1, 11)]
    scheduler.add_requests(requests)
    output = scheduler.schedule()
    assert [new.handle for new in output.scheduled_new_reqs] == list(range(1, 11))
    assert output.scheduled_cached_reqs.handles == []
    assert counts(output) == [100] * 10
    assert scheduler.running == requests
    assert len(scheduler.waiting) == 0


def test_one_budget_for_prefill_and_decode_a2() -> None:
    """A2"""
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    scheduler.add_requests([make_request(i, 800) for i in (1, 2, 3)])
    steps = [counts(run_step(scheduler)[0]) for _ in range(3)]
    assert steps == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_threshold_is_a_fairness_device_a3() -> None:
    """A3"""
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    scheduler.add_requests([make_request(1, 2000)])
    assert counts(run_step(scheduler)[0]) == [1024]
    scheduler = make_scheduler(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    scheduler.add_requests([make_request(1, 2000), make_request(2, 10)])
    assert counts(run_step(scheduler)[0]) == [400, 10]


def test_unsplit_prompt_blocks_those_behind_a4() -> None:
    """A4"""
    scheduler = make_scheduler(
        max_num_batched_tokens=1000, max_model_len=1000, enable_chunked_prefill=False
    )
    scheduler.add_requests([make_request(1, 600), make_request(2, 600), make_request(3, 50)])
    assert counts(run_step(scheduler)[0]) == [600]
    assert scheduler.blocked_on == "a step with room for its whole prompt"
    assert counts(run_step(scheduler)[0]) == [1, 600, 50]
    chunked = make_scheduler(max_num_batched_tokens=1000)
    chunked.add_requests([make_request(1, 600), make_request(2, 600), make_request(3, 50)])
    assert counts(run_step(chunked)[0]) == [600, 400]
    assert counts(run_step(chunked)[0]) == [1, 200, 50]


STOPS = [
    # name, rules, sampled, kept, reason, stop_token_id
    ("eos is kept", {}, [EOS], [EOS], FinishReason.STOP, None),
    ("after eos", {}, [10, EOS, 11], [10, EOS], FinishReason.STOP, None),
    ("stop token", {"stop_token_ids": [42]}, [10, 42, 12], [10, 42], FinishReason.STOP, 42),
    ("max_tokens", {"max_tokens": 2}, [10, 11, 12], [10, 11], FinishReason.LENGTH, None),
    ("eos before length", {"max_tokens": 2}, [10, EOS], [10, EOS], FinishReason.STOP, None),
    ("ignore_eos", {"ignore_eos": True}, [10, EOS, 11], [10, EOS, 11], None, None),
    (
        "ignore_eos but listed",
        {"ignore_eos": True, "stop_token_ids": [EOS]},
        [EOS, 1],
        [EOS],
        FinishReason.STOP,
        EOS,
    ),
    ("eos below min_tokens", {"min_tokens": 5}, [EOS], [EOS], FinishReason.STOP, None),
    (
        "stop below min_tokens",
        {"min_tokens": 5, "stop_token_ids": [42]},
        [42, 1],
        [42],
        FinishReason.STOP,
        42,
    ),
    (
        "length below min_tokens",
        {"min_tokens": 5, "max_tokens": 2},
        [1, 2, 3],
        [1, 2],
        FinishReason.LENGTH,
        None,
    ),
    (
        "context below min_tokens",
        {"min_tokens": 99, "max_tokens": None},
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 6],
        FinishReason.LENGTH,
        None,
    ),
]


@pytest.mark.parametrize(
    ("rules", "sampled", "kept", "reason", "stop_token_id"),
    [case[1:] for case in STOPS],
    ids=[case[0] for case in STOPS],
)
def test_stop_rules_a6(
    rules: dict[str, object],
    sampled: list[int],
    kept: list[int],
    reason: FinishReason | None,
    stop_token_id: int | None,
) -> None:
    """A6"""
    scheduler = make_scheduler(max_model_len=16)
    request = make_request(1, 10, **rules)  # type: ignore[arg-type]
    scheduler.add_requests([request])
    _, (output,) = run_step(scheduler, {1: sampled})
    assert output.new_token_ids == kept
    assert request.output_token_ids == kept
    if reason is None:
        assert output.finished is None
        return
    assert output.finished is not None
    assert output.finished.finish_reason is reason
    assert output.finished.stop_token_id == stop_token_id
    assert output.finished.num_freed_blocks == 1
    assert_nothing_left(scheduler)


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


def test_nothing_is_left_after_the_last_request_a10() -> None:
    """A10"""
    scheduler = make_scheduler(num_blocks=30)
    scheduler.add_requests([make_request(i, 50, max_tokens=i) for i in range(1, 11)])
    run_step(scheduler)
    assert scheduler.abort(3) is not None
    while scheduler.requests:
        run_step(scheduler)
    assert_nothing_left(scheduler)
    output = scheduler.schedule()
    assert output.is_empty or output.finished_handles
    assert scheduler.schedule().is_empty


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_after_k_steps_has_k_tokens_a13(num_steps: int) -> None:
    """A13: and a result that comes after the abort is dropped."""
    scheduler = make_scheduler()
    request = make_request(1, 20)
    scheduler.add_requests([request, make_request(2, 20)])
    for _ in range(num_steps):
        run_step(scheduler)
    output = scheduler.schedule()
    result = result_of(scheduler, output)
    finished = scheduler.abort(1)
    assert finished is not None
    assert finished.finish_reason is FinishReason.ABORT
    assert finished.num_freed_blocks == 2
    outputs = scheduler.update_from_output(output, result)
    assert [o.request.handle for o in outputs] == [2]
    assert len(request.output_token_ids) == num_steps
    assert scheduler.schedule().finished_handles == [1]


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


def test_second_request_of_a_prefix_computes_the_rest_b3() -> None:
    """B3: two equal 100-token prompts in one step: the second computes 4."""
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(1, [7] * 100), make_request(2, [7] * 100)])
    output = scheduler.schedule()
    assert counts(output) == [100, 4]
    assert scheduler.counters.prefix_cache_queries == 200
    assert scheduler.counters.prefix_cache_hits == 96


def test_follow_up_turn_computes_only_its_end_b3() -> None:
    """B3"""
    scheduler = make_scheduler()
    prompt = list(range(1000, 1100))
    first = make_request(1, prompt, max_tokens=30)
    scheduler.add_requests([first])
    while scheduler.requests:
        run_step(scheduler, {1: [first.num_tokens]})
    second = make_request(2, [*prompt, *first.output_token_ids, 5, 6, 7, 8, 9])
    scheduler.add_requests([second])
    # 100 + 30 + 5 tokens; the last token of the first turn was never computed.
    assert counts(scheduler.schedule()) == [135 - 128]


def test_block_that_the_last_computed_token_fills_is_found() -> None:
    scheduler = make_scheduler()
    first = make_request(1, 10, max_tokens=7)
    scheduler.add_requests([first])
    while scheduler.requests:
        run_step(scheduler)
    scheduler.add_requests([make_request(2, [*first.prompt_token_ids, *first.output_token_ids])])
    assert counts(scheduler.schedule()) == [1]


def test_life_cycle_counts_c1() -> None:
    """C1"""
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(1)])
    assert (scheduler.stats().num_waiting_reqs, scheduler.stats().num_running_reqs) == (1, 0)
    run_step(scheduler)
    assert (scheduler.stats().num_waiting_reqs, scheduler.stats().num_running_reqs) == (0, 1)
    scheduler.abort(1)
    assert (scheduler.stats().num_waiting_reqs, scheduler.stats().num_running_reqs) == (0, 0)
    output, outputs = run_step(scheduler)
    assert output.finished_handles == [1]
    assert outputs == []
    assert not scheduler.has_work
    again = make_request(2)
    again.request_id = "request-1"
    scheduler.add_requests([again])
    assert len(run_step(scheduler)[1]) == 1


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


def test_failed_request_ends_alone_c2() -> None:
    """C2: only the culprit ends, with zero tokens."""
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(1, 20), make_request(2, 20)])
    output = scheduler.schedule()
    result = ModelRunnerOutput(1, [1, 2], [0, 1], [9], failed={1: InternalError("boom")})
    outputs = scheduler.update_from_output(output, result)
    ended = {o.request.handle: o.finished for o in outputs}
    assert ended[2] is None
    assert ended[1] is not None
    assert ended[1].finish_reason is FinishReason.ERROR
    assert ended[1].error is not None
    assert scheduler.schedule().finished_handles == [1]


def test_failed_requests_blocks_are_not_trusted() -> None:
    """What the culprit did not write is not found, and who took it in the same step starts over."""
    scheduler = make_scheduler()
    prompt = [7] * 100
    sharer, other = make_request(2, list(prompt)), make_request(3, 20)
    scheduler.add_requests([make_request(1, list(prompt)), sharer, other])
    output = scheduler.schedule()
    result = ModelRunnerOutput(1, [1, 2, 3], [0, 1, 1], [8, 9], failed={1: InternalError("boom")})
    outputs = scheduler.update_from_output(output, result)
    assert sorted(o.request.handle for o in outputs) == [1, 3]
    assert sharer.output_token_ids == []
    assert sharer.status is RequestStatus.PREEMPTED
    output = scheduler.schedule()
    assert output.preempted_handles == [2]
    (new,) = output.scheduled_new_reqs
    assert (new.handle, new.num_computed_tokens, new.num_scheduled_tokens) == (2, 0, 100)


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


def logprobs_of(tokens: list[int]) -> Logprobs:
    return Logprobs([1] * len(tokens), tokens, [-0.5] * len(tokens), [1] * len(tokens))


def test_logprobs_end_with_the_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add_requests([make_request(1, 10, stop_token_ids=[42])])
    output = scheduler.schedule()
    result = ModelRunnerOutput(1, [1], [3], [10, 42, 12], logprobs={1: logprobs_of([10, 42, 12])})
    (first,) = scheduler.update_from_output(output, result)
    assert first.logprobs is not None
    assert first.logprobs.token_ids == [10, 42]


def test_prompt_logprobs_come_once_though_the_prompt_is_computed_twice() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    prompt = list(range(40))
    scheduler.add_requests([make_request(1, prompt, skip_reading_prefix_cache=True)])
    seen: list[int] = []
    for step in range(6):
        if step == 2:
            scheduler.reset_prefix_cache(preempt_running=True)
        output = scheduler.schedule()
        result = result_of(scheduler, output)
        start = output.num_computed_tokens()[1]
        positions = prompt[start + 1 : start + 1 + output.num_scheduled_tokens()[1]]
        if positions:
            result.prompt_logprobs[1] = logprobs_of(positions)
        for part in scheduler.update_from_output(output, result):
            seen += part.prompt_logprobs.token_ids if part.prompt_logprobs else []
    assert seen == prompt[1:]


def test_empty_schedule_has_no_number() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule().is_empty
    scheduler.add_requests([make_request(1)])
    assert scheduler.schedule().step == 1
