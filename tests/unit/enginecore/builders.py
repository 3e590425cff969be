"""Requests and schedulers as the behaviours describe them: block size 16, EOS 50256."""

from collections.abc import Mapping, Sequence
from typing import Any

from enginecore.clock import Clock
from enginecore.kv_cache_manager import KVCacheManager
from enginecore.request import Request, StopRules
from enginecore.scheduler import Scheduler
from enginecore.scheduler_config import SchedulerConfig
from enginecore.scheduler_output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
EOS = 50256


class ManualClock(Clock):
    """Time that moves when told."""

    def __init__(self) -> None:
        self.time_ns = 1_000

    def now_ns(self) -> int:
        return self.time_ns


def make_request(
    handle: int,
    prompt: int | list[int] = 10,
    *,
    max_tokens: int | None = 16,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    **fields: Any,
) -> Request:
    """Request `handle`; a prompt given as a length repeats the handle."""
    rules = StopRules(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        eos_token_ids=frozenset({EOS}),
        ignore_eos=ignore_eos,
    )
    tokens = [handle] * prompt if isinstance(prompt, int) else prompt
    fields.setdefault("arrival_ns", handle)
    return Request(f"request-{handle}", handle, tokens, rules, **fields)


def make_scheduler(
    *,
    num_blocks: int = 10_000,
    prefix_caching: bool = True,
    clock: Clock | None = None,
    **config: Any,
) -> Scheduler:
    """A scheduler over its own pool."""
    config = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        **config,
    }
    kv_cache = KVCacheManager(num_blocks, BLOCK_SIZE, 1, prefix_caching)
    return Scheduler(SchedulerConfig(**config), kv_cache, clock)


def counts(output: SchedulerOutput) -> list[int]:
    """Scheduled tokens per request, in the order of handles."""
    return [count for _, count in sorted(output.num_scheduled_tokens().items())]


def result_of(
    scheduler: Scheduler,
    output: SchedulerOutput,
    tokens: Mapping[int, list[int]] | None = None,
    default: int = 0,
) -> ModelRunnerOutput:
    """What a worker would answer: a token for each request whose known tokens are computed."""
    result = ModelRunnerOutput(output.step)
    computed = output.num_computed_tokens()
    for handle, num_new in output.num_scheduled_tokens().items():
        request = scheduler.requests.get(handle)
        sampled: list[int] = []
        if request is not None and computed[handle] + num_new >= request.num_tokens:
            sampled = (tokens or {}).get(handle, [default])
        result.handles.append(handle)
        result.num_sampled_tokens.append(len(sampled))
        result.sampled_token_ids += sampled
    return result


def run_step(
    scheduler: Scheduler, tokens: Mapping[int, list[int]] | None = None
) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """Schedules and answers one step."""
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, result_of(scheduler, output, tokens))


def assert_nothing_left(scheduler: Scheduler) -> None:
    """A10: no request, no table, no holder, every block free."""
    assert not scheduler.requests
    assert not scheduler.running
    assert len(scheduler.waiting) == 0
    kv_cache = scheduler._kv_cache
    assert all(manager.num_tables == 0 for manager in kv_cache.coordinator.managers)
    assert kv_cache.pool.num_free_blocks == kv_cache.pool.num_usable_blocks
    assert all(block.ref_count == 0 for block in kv_cache.pool.blocks)
