"""What the gateway and an engine tell each other, as plain values.

`EngineRequest` goes down, `EngineDelta`s come up; a delta with `finished` is the last of its
request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.errors import ServiceError


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How tokens are chosen; `None` leaves a field to the engine's default."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


@dataclass(slots=True)
class EngineRequest:
    """One sequence to generate.

    Attributes:
        request_id: unique among live requests.
        prompt_token_ids: at least one.
        timeout_ms: from now; None: no limit.
        cache_salt: cached prefixes are shared with the same salt only.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    timeout_ms: int | None = None
    cache_salt: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass(slots=True, frozen=True)
class RequestStats:
    """Counts and times of a sequence's life; times in Unix nanoseconds, None: never got there."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    queued_unix_ns: int = 0
    scheduled_unix_ns: int | None = None
    first_token_unix_ns: int | None = None
    last_token_unix_ns: int | None = None
    finished_unix_ns: int = 0


@dataclass(slots=True, frozen=True)
class Finished:
    """How a sequence ended.

    Attributes:
        stop_token_id: the stop token that ended it; None for an end-of-sequence token.
        error: set exactly when the reason is ERROR.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    error: ServiceError | None = None
    stats: RequestStats = RequestStats()


@dataclass(slots=True)
class EngineDelta:
    """News of one sequence of a group.

    Attributes:
        index: the sequence's place in its group.
        token_ids: since the previous delta.
        finished: set in the last one.
    """

    index: int
    token_ids: list[int]
    finished: Finished | None = None

    def merge(self, later: "EngineDelta") -> None:
        """Takes in the next delta of the same sequence, for a reader that lags."""
        self.token_ids.extend(later.token_ids)
        self.finished = later.finished or self.finished
