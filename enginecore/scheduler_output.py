"""What passes between scheduler, executor and clients in one step.

Per-step data of running requests is columns of integers: one row per request costs a few appends,
and the edge copies whole columns into packed fields.
"""

from dataclasses import dataclass, field

from enginecore.request import FinishedRequest, Request
from services.errors import ServiceError


@dataclass(slots=True)
class NewRequestData:
    """A request that joins the workers' batch, in full. `block_ids` has a list per KV group."""

    handle: int
    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: object
    block_ids: list[list[int]]
    num_computed_tokens: int
    num_scheduled_tokens: int
    resumed: bool
    traceparent: str | None = None


@dataclass(slots=True)
class CachedRequestData:
    """Requests of the batch that run again; equal-length columns, one row per request.

    `num_new_blocks` has an entry per request and KV group (request-major), and `new_block_ids`
    those blocks, flattened in the same order.
    """

    handles: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step and what changed since the previous one.

    Applied in this order: finished and preempted leave, new ones join, cached ones are updated.
    """

    step: int
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    finished_handles: list[int] = field(default_factory=list)
    preempted_handles: list[int] = field(default_factory=list)
    total_num_scheduled_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the workers."""
        return not (
            self.total_num_scheduled_tokens or self.finished_handles or self.preempted_handles
        )

    def num_scheduled_tokens(self) -> dict[int, int]:
        """Tokens to compute per handle."""
        cached = self.scheduled_cached_reqs
        counts = dict(zip(cached.handles, cached.num_scheduled_tokens, strict=True))
        counts.update((new.handle, new.num_scheduled_tokens) for new in self.scheduled_new_reqs)
        return counts

    def num_computed_tokens(self) -> dict[int, int]:
        """Tokens per handle that were computed before this step."""
        cached = self.scheduled_cached_reqs
        counts = dict(zip(cached.handles, cached.num_computed_tokens, strict=True))
        counts.update((new.handle, new.num_computed_tokens) for new in self.scheduled_new_reqs)
        return counts


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of consecutive positions, as columns.

    Position i has `num_candidates[i]` consecutive entries in the other columns: the chosen token
    first, then the alternatives, most likely first.
    """

    num_candidates: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def extend(self, other: "Logprobs") -> None:
        """Appends the positions of `other`."""
        self.num_candidates += other.num_candidates
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks

    def positions(self, start: int, end: int) -> "Logprobs":
        """The positions `start` to `end`, exclusive."""
        first = sum(self.num_candidates[:start])
        last = first + sum(self.num_candidates[start:end])
        return Logprobs(
            self.num_candidates[start:end],
            self.token_ids[first:last],
            self.logprobs[first:last],
            self.ranks[first:last],
        )

    def split(self, handles: list[int]) -> "dict[int, Logprobs]":
        """The positions of each request, given the request of each position."""
        parts: dict[int, Logprobs] = {}
        first = 0
        for handle, count in zip(handles, self.num_candidates, strict=True):
            last = first + count
            part = parts.setdefault(handle, Logprobs())
            part.num_candidates.append(count)
            part.token_ids += self.token_ids[first:last]
            part.logprobs += self.logprobs[first:last]
            part.ranks += self.ranks[first:last]
            first = last
        return parts


@dataclass(slots=True)
class StepTimings:
    """When one step began on the worker (Unix nanoseconds) and how long its parts took."""

    started_ns: int = 0
    queue_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one step: each request that ran once, its sampled tokens flattened."""

    step: int
    handles: list[int] = field(default_factory=list)
    num_sampled_tokens: list[int] = field(default_factory=list)
    sampled_token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    failed: dict[int, ServiceError] = field(default_factory=dict)
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step, an abort or a refusal brought for one request."""

    request: Request
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finished: FinishedRequest | None = None
