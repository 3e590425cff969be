import pytest

from enginecore.request import FinishReason, RequestStatus
from enginecore.scheduler_output import Logprobs, ModelRunnerOutput
from services.errors import (
    InternalError,
)
from tests.unit.enginecore.builders import (
    EOS,
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
