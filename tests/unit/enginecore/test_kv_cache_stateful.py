"""Scheduler and KVCacheManager against a naive model, in random order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginecore.request import Request, RequestStatus
from tests.unit.enginecore.builders import BLOCK_SIZE, make_request, make_scheduler, result_of

NUM_BLOCKS = 9


class SchedulerMachine(RuleBasedStateMachine):
    """The naive model knows only which requests live, and what each slot was last written with."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            num_blocks=NUM_BLOCKS, max_num_seqs=3, max_num_batched_tokens=40
        )
        self.live: dict[int, Request] = {}
        self.last_handle = 0
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    @rule(
        kind=st.sampled_from([3, 4]),
        length=st.integers(1, 60),
        own=st.booleans(),
        max_tokens=st.integers(1, 40),
    )
    def add(self, kind: int, length: int, own: bool, max_tokens: int) -> None:
        self.last_handle += 1
        prompt = [kind] * length + ([self.last_handle + 100] if own else [])
        request = make_request(self.last_handle, prompt, max_tokens=max_tokens)
        assert self.scheduler.add_requests([request]) == []
        self.live[request.handle] = request

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[handle]
        assert self.scheduler.abort(handle) is not None
        assert self.scheduler.abort(handle) is None

    @rule()
    def preempt_all(self) -> None:
        assert self.scheduler.reset_prefix_cache(preempt_running=True)

    @rule()
    def step(self) -> None:
        output = self.scheduler.schedule()
        assert output.total_num_scheduled_tokens <= 40
        if self.live:
            assert output.total_num_scheduled_tokens > 0 or output.preempted_handles
        computed = output.num_computed_tokens()
        kv_cache = self.scheduler._kv_cache
        tables = {handle: kv_cache.block_ids(handle)[0] for handle in computed}
        for handle, count in output.num_scheduled_tokens().items():
            tokens = self.tokens_of(handle)
            for position in range(computed[handle], computed[handle] + count):
                slot = (tables[handle][position // BLOCK_SIZE], position % BLOCK_SIZE)
                self.slots[slot] = tokens[: position + 1]
        for handle, count in output.num_scheduled_tokens().items():
            tokens = self.tokens_of(handle)
            for position in range(computed[handle] + count):
                slot = (tables[handle][position // BLOCK_SIZE], position % BLOCK_SIZE)
                assert self.slots[slot] == tokens[: position + 1]
        for part in self.scheduler.update_from_output(
            output, result_of(self.scheduler, output, default=7)
        ):
            if part.finished is not None:
                del self.live[part.request.handle]

    def tokens_of(self, handle: int) -> tuple[int, ...]:
        request = self.live[handle]
        return (*request.prompt_token_ids, *request.output_token_ids)

    @invariant()
    def nothing_is_lost(self) -> None:
        scheduler = self.scheduler
        assert scheduler.requests == self.live
        assert len(scheduler.running) + len(scheduler.waiting) == len(self.live)
        assert len(scheduler.running) <= 3
        pool, kv_cache = scheduler._kv_cache.pool, scheduler._kv_cache
        holders = [0] * NUM_BLOCKS
        for request in scheduler.running:
            assert request.status is RequestStatus.RUNNING
            for block_id in kv_cache.block_ids(request.handle)[0]:
                holders[block_id] += 1
        assert [block.ref_count for block in pool.blocks] == holders
        free = pool.free_block_ids()
        assert sorted(free) == [i for i in range(1, NUM_BLOCKS) if holders[i] == 0]
        assert len(free) == pool.num_free_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
