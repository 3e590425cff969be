"""Which requests run in the next step, and what its result means for them."""

from collections.abc import Sequence

from enginecore.admission import check_limits, check_request, check_unique
from enginecore.clock import Clock
from enginecore.deadline_queue import DeadlineQueue
from enginecore.kv_cache_manager import KVCacheManager
from enginecore.request import FinishedRequest, FinishReason, Request, RequestStatus, check_stop
from enginecore.request_queue import make_request_queue
from enginecore.scheduler_config import SchedulerConfig
from enginecore.scheduler_output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from enginecore.stats import Counters, SchedulerStats
from enginecore.step_plan import StepPlan
from services.errors import DeadlineExceededError, ResourceExhaustedError, ServiceError


class Scheduler:
    """Owns the live requests, their order and, through the KVCacheManager, their blocks.

    Pure and single-threaded: the engine's task calls it. The algorithm:

    1. There are no phases. A request has `num_tokens` known tokens of which `num_computed_tokens`
       are in the cache; a step computes the next ones until both are equal, and then a new token is
       sampled. Prompt chunks and single decode tokens are the same thing.
    2. One token budget per step. Running requests spend it first, in the order of joining; then
       waiting ones join in the policy's order while slots (max_num_seqs), blocks and budget last.
       Nobody overtakes: the first that does not fit ends the step.
    3. A running request that needs a block when none is free makes the policy's victim give up all
       of its own. The victim waits at the head, and later recomputes what it had.
    4. `num_computed_tokens` moves when a step is scheduled, not when its result arrives, so several
       steps may be under way; a result for a request that left in between is dropped.

    Every request that `add_requests` took is given exactly one FinishedRequest, by
    `update_from_output`, `abort`, `expire` or `add_requests` itself.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._clock = clock if clock is not None else Clock()
        # No request may outgrow the pool, or it would preempt itself for ever.
        self.max_model_len = min(config.max_model_len, kv_cache.capacity_tokens)
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_request_queue(config.scheduling_policy)
        self.counters = Counters()
        self.blocked_on = ""
        self._live_ids: set[str] = set()
        self._num_prompt_tokens = 0
        self._deadlines = DeadlineQueue(self.requests)
        self._finished_handles: list[int] = []
        self._preempted_handles: list[int] = []
        self._step = 0
        self._num_scheduled_tokens = 0

    # ---- admission and leaving

    def add_requests(self, requests: Sequence[Request]) -> list[FinishedRequest]:
        """Queues all of `requests` or none.

        Returns those that end at once: resumed ones whose tokens so far already satisfy a stop
        rule. Errors: InvalidArgumentError, AlreadyExistsError, ResourceExhaustedError.
        """
        for request in requests:
            check_request(request, self.max_model_len)
        check_unique(requests, self._live_ids)
        try:
            check_limits(requests, self._config.limits, len(self.requests), self._num_prompt_tokens)
        except ResourceExhaustedError:
            self.counters.num_rejected_reqs += 1
            raise
        for request in requests:
            self._admit(request)
        return [done for request in requests if (done := self._finish_if_stopped(request))]

    def _admit(self, request: Request) -> None:
        self.requests[request.handle] = request
        self._live_ids.add(request.request_id)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._deadlines.add(request)
        self.waiting.add(request)

    def abort(self, handle: int) -> FinishedRequest | None:
        """Ends a request for its client; None when it is not live."""
        request = self.requests.get(handle)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def fail(self, handle: int, error: ServiceError) -> FinishedRequest | None:
        """Ends a request with an error; None when it is not live."""
        request = self.requests.get(handle)
        return None if request is None else self._finish(request, FinishReason.ERROR, error=error)

    def expire(self) -> list[FinishedRequest]:
        """Ends the requests whose deadline has passed, waiting or running."""
        if self._deadlines.next_ns() is None:
            return []
        return [
            self._finish(
                request,
                FinishReason.ERROR,
                error=DeadlineExceededError("the request's deadline passed"),
            )
            for request in self._deadlines.pop_expired(self._clock.now_ns())
        ]

    def next_deadline_ns(self) -> int | None:
        """When `expire` has work next; None: never."""
        return self._deadlines.next_ns()

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        stop_token_id: int | None = None,
        error: ServiceError | None = None,
        num_valid_tokens: int | None = None,
    ) -> FinishedRequest:
        """Takes a request out of everything and frees its blocks."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._finished_handles.append(request.handle)
        else:
            self.waiting.remove(request)
        num_freed = self._kv_cache.free(request, num_valid_tokens)
        request.status = RequestStatus.FINISHED
        request.finished_ns = self._clock.now_ns()
        del self.requests[request.handle]
        self._live_ids.remove(request.request_id)
        self._num_prompt_tokens -= request.num_prompt_tokens
        return FinishedRequest(request, reason, stop_token_id, error, num_freed)

    def _finish_if_stopped(self, request: Request) -> FinishedRequest | None:
        """Ends a request whose last output token is the last one it may have."""
        stop = check_stop(request, self.max_model_len) if request.output_token_ids else None
        return None if stop is None else self._finish(request, *stop)

    # ---- a step

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something or has news for the workers."""
        return bool(self.requests or self._finished_handles or self._preempted_handles)

    def schedule(self) -> SchedulerOutput:
        """Puts the next step together. An empty one is not to be sent and has no number."""
        budget = self._config.max_num_batched_tokens
        plan = StepPlan(self._step + 1, budget, self._kv_cache.num_groups)
        self.blocked_on = ""
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        output = SchedulerOutput(
            plan.step,
            plan.new,
            plan.cached,
            self._finished_handles,
            self._preempted_handles + plan.preempted,
            budget - plan.budget,
        )
        self._finished_handles, self._preempted_handles = [], []
        if not output.is_empty:
            self._step = plan.step
        self._num_scheduled_tokens = output.total_num_scheduled_tokens
        return output

    def _schedule_running(self, plan: StepPlan) -> None:
        """Gives each running request its next tokens, preempting when blocks are short."""
        index = 0
        while index < len(self.running) and plan.budget > 0:
            request = self.running[index]
            num_new = self._chunk(request.num_tokens - request.num_computed_tokens, plan.budget)
            if num_new == 0:
                # Nothing to do before its token arrives.
                index += 1
            elif request.num_computed_tokens + num_new < request.num_slots:
                # No block is needed and none becomes full: the common decode step.
                plan.add_cached(request, num_new, plan.no_blocks)
                index += 1
            else:
                new_blocks = self._allocate_or_preempt(request, num_new, plan)
                if new_blocks is None:
                    return
                plan.add_cached(request, num_new, new_blocks)
                # A victim before it moved it.
                index = self.running.index(request, 0, index + 1) + 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Lets waiting requests join while slots, blocks and budget last."""
        while self.waiting and plan.budget > 0:
            if len(self.running) >= self._config.max_num_seqs:
                self.blocked_on = "a slot (max_num_seqs)"
                return
            request = self.waiting.peek()
            hits, num_hit_tokens = self._kv_cache.get_computed_blocks(request)
            num_new = self._chunk(request.num_tokens - num_hit_tokens, plan.budget)
            if num_new == 0:
                self.blocked_on = "a step with room for its whole prompt"
                return
            if self._kv_cache.allocate_slots(request, num_new, hits) is None:
                self.blocked_on = "free KV cache blocks"
                return
            self.waiting.remove(request)
            self._join(request, num_hit_tokens, num_new, plan)
        self.blocked_on = "the token budget"

    def _chunk(self, num_missing: int, budget: int) -> int:
        """Tokens to compute now of `num_missing`: 0 when they do not fit and must not be split."""
        config = self._config
        if not config.enable_chunked_prefill:
            return num_missing if num_missing <= budget else 0
        threshold = config.long_prefill_token_threshold
        if threshold and num_missing > threshold and len(self.requests) > 1:
            # Only while somebody else could use the rest of the step.
            num_missing = threshold
        return min(num_missing, budget)

    def _join(self, request: Request, num_hit_tokens: int, num_new: int, plan: StepPlan) -> None:
        """Moves a request from waiting to running; its blocks are allocated."""
        resumed = request.status is RequestStatus.PREEMPTED
        if self._kv_cache.enable_prefix_caching and not request.skip_reading_prefix_cache:
            self.counters.count_look_up(request.num_tokens, num_hit_tokens, resumed)
        if request.scheduled_ns is None:
            request.scheduled_ns = self._clock.now_ns()
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            self.counters.prompt_tokens += request.num_prompt_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        self.running.append(request)
        plan.add_new(request, num_new, self._kv_cache.block_ids(request.handle), resumed)

    # ---- preemption

    def _allocate_or_preempt(
        self, request: Request, num_new: int, plan: StepPlan
    ) -> list[list[int]] | None:
        """New block ids per group; None when the request itself had to give way."""
        while (new_blocks := self._kv_cache.allocate_slots(request, num_new)) is None:
            victim = self.waiting.choose_victim(self.running)
            plan.preempt(victim)
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _preempt(self, request: Request, num_valid_tokens: int | None = None) -> None:
        """Takes a running request's blocks and puts it back in the queue."""
        if num_valid_tokens is None:
            # Blocks are findable from their allocation on; these tokens are or will be in them.
            num_valid_tokens = request.num_computed_tokens
        self.running.remove(request)
        self._kv_cache.free(request, num_valid_tokens)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.put_back(request)

    def preempt_all(self) -> None:
        """Puts all running requests back in the queue, in their order."""
        for request in reversed(self.running.copy()):
            self._preempt(request)
            self._preempted_handles.append(request.handle)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets all prefixes; False, changing nothing, while a block is in use."""
        if preempt_running:
            self.preempt_all()
        return self._kv_cache.reset_prefix_cache()

    def forget_workers(self) -> None:
        """Starts over with workers that hold no request and no cache contents."""
        self.reset_prefix_cache(preempt_running=True)
        self._finished_handles, self._preempted_handles = [], []

    # ---- results

    def update_from_output(
        self, scheduled: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Takes a step's result: appends tokens, applies the stop rules, ends failed requests.

        Results of requests that left since, or that are recomputed because their prefix came from
        a failed one, are dropped.
        """
        outputs: list[EngineCoreOutput] = []
        dropped: set[int] = set()
        if result.failed:
            self._fail_in_step(scheduled, result.failed, outputs, dropped)
        starts = scheduled.num_computed_tokens() if result.prompt_logprobs else {}
        now_ns = self._clock.now_ns()
        tokens, first = result.sampled_token_ids, 0
        for handle, count in zip(result.handles, result.num_sampled_tokens, strict=True):
            request = self.requests.get(handle)
            if request is not None and handle not in dropped and (count or starts):
                output = EngineCoreOutput(request)
                if starts:
                    self._accept_prompt_logprobs(output, result, starts.get(handle, 0))
                if count:
                    self._accept_tokens(output, tokens[first : first + count], result, now_ns)
                if output.new_token_ids or output.prompt_logprobs is not None:
                    outputs.append(output)
            first += count
        return outputs

    def _accept_tokens(
        self, output: EngineCoreOutput, tokens: list[int], result: ModelRunnerOutput, now_ns: int
    ) -> None:
        """Appends sampled tokens up to the one that ends the request, which is kept."""
        request = output.request
        if request.first_token_ns is None:
            request.first_token_ns = now_ns
        request.last_token_ns = now_ns
        for token_id in tokens:
            request.append_output(token_id)
            output.new_token_ids.append(token_id)
            stop = check_stop(request, self.max_model_len)
            if stop is not None:
                output.finished = self._finish(request, *stop)
                break
        self.counters.generation_tokens += len(output.new_token_ids)
        if result.logprobs:
            logprobs = result.logprobs.get(request.handle)
            if logprobs is not None:
                output.logprobs = logprobs.positions(0, len(output.new_token_ids))

    def _accept_prompt_logprobs(
        self, output: EngineCoreOutput, result: ModelRunnerOutput, num_computed: int
    ) -> None:
        """Passes on the prompt positions that the client does not have yet."""
        request = output.request
        logprobs = result.prompt_logprobs.get(request.handle)
        if logprobs is None:
            return
        # After a preemption the prompt is computed again from its start.
        end = num_computed + len(logprobs.num_candidates)
        known = max(0, request.num_prompt_logprobs - num_computed)
        if end > request.num_prompt_logprobs:
            output.prompt_logprobs = logprobs.positions(known, end - num_computed)
            request.num_prompt_logprobs = end

    def _fail_in_step(
        self,
        scheduled: SchedulerOutput,
        failed: dict[int, ServiceError],
        outputs: list[EngineCoreOutput],
        dropped: set[int],
    ) -> None:
        """Ends requests that failed on the worker; what they did not write must not be found."""
        num_computed = scheduled.num_computed_tokens()
        for handle, error in failed.items():
            request = self.requests.get(handle)
            if request is None:
                continue
            num_valid = num_computed.get(handle, 0)
            unwritten = self._kv_cache.blocks_after(handle, num_valid)
            finished = self._finish(request, FinishReason.ERROR, None, error, num_valid)
            outputs.append(EngineCoreOutput(request, finished=finished))
            dropped.add(handle)
            for sharer in reversed(self.running.copy()):
                # Took the failed request's blocks in the same step: starts over.
                if not unwritten.isdisjoint(self._kv_cache.blocks_after(sharer.handle, 0)):
                    self._preempt(sharer, num_valid_tokens=num_computed.get(sharer.handle, 0))
                    self._preempted_handles.append(sharer.handle)
                    dropped.add(sharer.handle)

    # ---- views

    def stats(self) -> SchedulerStats:
        """The state now."""
        pool, counters = self._kv_cache.pool, self.counters
        return SchedulerStats(
            step=self._step,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage_ratio=self._kv_cache.usage_ratio,
            num_blocks=pool.num_usable_blocks,
            num_free_blocks=pool.num_free_blocks,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
        )

    def num_blocks_of(self, request: Request) -> int:
        """Blocks that the request holds, in all groups."""
        return self._kv_cache.num_blocks_of(request.handle) * self._kv_cache.num_groups
