"""One step's work and its result, as plain data."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.errors import ServiceError
from worker.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class NewRequest:
    """A request that joins the batch."""

    handle: int
    request_id: str
    prompt_token_ids: IntArray
    output_token_ids: IntArray
    sampling: SamplingParams
    block_ids: list[IntArray]
    """Per KV cache group."""
    num_computed_tokens: int
    num_scheduled_tokens: int
    resumed: bool = False
    traceparent: str | None = None


@dataclass(slots=True)
class CachedRequests:
    """Requests of the batch that run again: one row each, all columns `[num_requests]`."""

    handles: IntArray
    num_computed_tokens: IntArray
    num_scheduled_tokens: IntArray
    num_new_blocks: IntArray
    """`[num_requests * num_groups]`: request-major, groups in order."""
    new_block_ids: IntArray
    """Flattened in the order of `num_new_blocks`."""


@dataclass(slots=True)
class StepInput:
    """What changed since the previous step, and what to compute now."""

    step: int
    new_requests: list[NewRequest]
    cached: CachedRequests
    finished_handles: list[int] = field(default_factory=list)
    preempted_handles: list[int] = field(default_factory=list)
    has_grammar: bool = False
    """Sampling waits for a GrammarMask."""
    trace_step: bool = False
    received_ns: int = 0
    """Monotonic clock when the message arrived."""


@dataclass(slots=True)
class GrammarMask:
    """Which tokens the grammars of some requests allow."""

    handles: list[int]
    bits: npt.NDArray[np.uint8]
    """`[num_requests, bytes]`; bit `t % 8` of byte `t // 8` allows token `t`."""


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities of token positions: `num_candidates[i]` entries for position `i`.

    The sampled (or given) token first, then the most likely ones, most likely first.
    """

    handles: list[int] = field(default_factory=list)
    """The request of each position."""
    num_candidates: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """One-based."""


@dataclass(slots=True)
class StepTimings:
    """Durations of one step, and when it began."""

    started_unix_ns: int = 0
    queue_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0


@dataclass(slots=True)
class StepResult:
    """What one step brought."""

    step: int
    handles: list[int]
    """The requests that ran, failed ones included."""
    num_sampled_tokens: list[int]
    """Per request of `handles`."""
    sampled_token_ids: list[int]
    """Flattened in the same order."""
    failed: dict[int, ServiceError] = field(default_factory=dict)
    logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    prompt_logprobs: LogprobColumns = field(default_factory=LogprobColumns)
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request whose keys and values are still in the cache."""

    request_id: str
    num_computed_tokens: int
    block_ids: list[list[int]]
    """Per KV cache group."""
