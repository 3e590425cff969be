"""The worker's batch, rebuilt from the deltas on the real stream, equals the scheduler's view."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from enginecore.app import load_options
from enginecore.executor import GrpcExecutor
from enginecore.scheduler import Scheduler
from enginecore.scheduler_output import ModelRunnerOutput, SchedulerOutput
from enginecore.settings import EnginecoreSettings
from tests.fakes.engine_stack import EngineStack, collect, engine_stack
from tests.fakes.shadow_batch import ShadowBatch, expected_tokens
from tests.fakes.worker import FakeModel

MAX_NUM_SEQS = 6


@dataclass
class View:
    """What the scheduler thinks the worker holds after a step's deltas."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    block_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    num_computed_tokens: dict[int, int] = field(default_factory=dict)
    num_scheduled_tokens: dict[int, int] = field(default_factory=dict)


class RecordingExecutor(GrpcExecutor):
    """Notes the scheduler's view at the moment when each step is sent."""

    scheduler: Scheduler | None = None

    def __init__(self, settings: EnginecoreSettings) -> None:
        super().__init__(settings.worker_address, "recording", load_options(settings))
        self.views: dict[int, View] = {}
        self.num_preempted = 0

    def execute(self, output: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
        scheduler = self.scheduler
        assert scheduler is not None
        view = View(num_scheduled_tokens=output.num_scheduled_tokens())
        for request in scheduler.running:
            handle = request.handle
            view.token_ids[handle] = [*request.prompt_token_ids, *request.output_token_ids]
            view.block_ids[handle] = scheduler._kv_cache.block_ids(handle)
            view.num_computed_tokens[handle] = request.num_computed_tokens
        self.views[output.step] = view
        self.num_preempted += len(output.preempted_handles)
        return super().execute(output)


def compare(view: View, batch: ShadowBatch) -> None:
    """Called after the step was computed, so the shadow's new tokens are one ahead."""
    assert set(batch.requests) == set(view.token_ids), "the sets of requests differ"
    assert batch.scheduled == view.num_scheduled_tokens, "the scheduled tokens differ"
    for handle, request in batch.requests.items():
        known = view.token_ids[handle]
        assert request.token_ids[: len(known)] == known, f"{handle}: the tokens differ"
        assert len(request.token_ids) - len(known) <= 1, f"{handle}: tokens too many"
        assert request.block_ids == view.block_ids[handle], f"{handle}: the block tables differ"
        assert request.num_computed_tokens == view.num_computed_tokens[handle], (
            f"{handle}: the computed tokens differ"
        )


async def client(stack: EngineStack, name: str, rng: random.Random) -> str:
    """One request with a random prompt that may be cancelled on its way."""
    await asyncio.sleep(rng.random() * 0.3)
    prefix = [rng.choice([3, 4])] * rng.choice([0, 16, 40])
    prompt = prefix + [rng.randrange(1, 1000) for _ in range(rng.randrange(1, 60))]
    max_tokens = rng.randrange(1, 50)
    known = expected_tokens(prompt, rng.choice([0, 0, 5]))[: max_tokens - 1]
    call = stack.generate(
        name, prompt, max_tokens, output_token_ids=known, priority=rng.randrange(3)
    )
    fate = rng.random()
    if fate < 0.3:
        asyncio.get_running_loop().call_later(rng.random() * 0.1, call.cancel)
    try:
        tokens, finished = await collect(call)
    except asyncio.CancelledError:
        return "cancelled"
    assert known + tokens == expected_tokens(prompt, max_tokens)
    assert finished.stats.num_output_tokens == max_tokens
    return "finished"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(("seed", "num_groups"), [(1, 1), (2, 1), (3, 1), (4, 2)])
async def test_shadow_batch_equals_the_schedulers_view_a8_a14(
    seed: int, num_groups: int, policy: str
) -> None:
    """A8, A14: random arrivals, cancels, prefixes and preemptions in a pool that is too small."""
    rng = random.Random(seed)
    async with engine_stack(
        model=FakeModel(num_groups=num_groups),
        make_executor=RecordingExecutor,
        num_gpu_blocks_override=16 * num_groups + 1,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=48,
        long_prefill_token_threshold=rng.choice([0, 20]),
        scheduling_policy=policy,
    ) as stack:
        executor, scheduler = stack.enginecore.executor, stack.enginecore.engine.scheduler
        assert isinstance(executor, RecordingExecutor)
        assert scheduler is not None
        executor.scheduler = scheduler
        num_compared = 0

        def check(step: int, batch: ShadowBatch) -> None:
            nonlocal num_compared
            compare(executor.views.pop(step), batch)
            num_compared += 1

        stack.worker.on_step = check
        fates = await asyncio.gather(*(client(stack, f"r{i}", rng) for i in range(60)))
        assert fates.count("finished") > 20
        assert fates.count("cancelled") > 3
        assert executor.num_preempted > 3
        await stack.wait_until(lambda: not scheduler.has_work)
        await stack.wait_until(lambda: not executor.views)
        assert num_compared > 100
        batch = stack.worker.batch
        assert batch is not None
        assert batch.requests == {}
        assert 3 <= batch.most_held <= MAX_NUM_SEQS
        assert stack.num_free_blocks == 16 * num_groups


async def test_a_corrupted_stream_is_noticed() -> None:
    """The check itself can fail: a block table that differs by one block is a mismatch."""

    class Corrupting(RecordingExecutor):
        def execute(self, output: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
            blocks = output.scheduled_cached_reqs.new_block_ids
            if blocks:
                blocks[0] = blocks[0] % 15 + 1
            return super().execute(output)

    async with engine_stack(make_executor=Corrupting, num_gpu_blocks_override=17) as stack:
        executor = stack.enginecore.executor
        assert isinstance(executor, Corrupting)
        executor.scheduler = stack.enginecore.engine.scheduler
        stack.worker.on_step = lambda step, batch: compare(executor.views.pop(step), batch)
        call = stack.generate("a", [5] * 15, 40)
        await stack.wait_until(lambda: bool(stack.worker.mismatches))
        call.cancel()
        await stack.wait_until(lambda: stack.num_unfinished == 0)
        assert "the block tables differ" in stack.worker.mismatches[0]
        stack.worker.mismatches.clear()
