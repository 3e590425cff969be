"""A request as the scheduler sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from services.errors import ServiceError


class RequestStatus(IntEnum):
    """Where a request is in its life. All values over PREEMPTED are final."""

    WAITING = 1
    WAITING_FOR_GRAMMAR = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED = 5


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, frozen=True)
class StopRules:
    """When the output of a request ends.

    `max_tokens` is None when only the context length bounds the output. `min_tokens` is carried for
    reports alone: it works in the sampler, which masks the stop tokens, not in the stop check.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from receipt to its final answer.

    `prompt_token_ids` and `output_token_ids` are only appended to through `append_output`.
    `sampling_params` is the wire message; it goes to the workers untouched and is never read here.
    `num_slots` is the number of tokens that the held blocks can take, kept by the KVCacheManager so
    that the common decode step is one comparison. Times are Unix nanoseconds.
    """

    request_id: str
    handle: int
    prompt_token_ids: list[int]
    stop_rules: StopRules
    sampling_params: object = None
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    arrival_ns: int = 0
    deadline_ns: int | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    skip_reading_prefix_cache: bool = False
    traceparent: str | None = None

    status: RequestStatus = RequestStatus.WAITING
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_slots: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    last_progress_step: int = 0

    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finished_ns: int | None = None

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those that came with a resumed request included."""
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has had its final answer."""
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        """Takes one sampled token."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        """Tokens `start` to `end` (exclusive) of the prompt followed by the output."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if end <= num_prompt_tokens:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt_tokens]


@dataclass(slots=True)
class FinishedRequest:
    """How a request ended; `error` is set exactly when the reason is ERROR."""

    request: Request
    finish_reason: FinishReason
    stop_token_id: int | None = None
    error: ServiceError | None = None
    num_freed_blocks: int = 0


def check_stop(request: Request, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """Tells whether the last output token ends the request, and the stop token if one did.

    In order: end of sequence, the request's stop tokens, then the length caps. min_tokens delays
    none of them: the sampler keeps stop tokens from being drawn too early, and a request must not
    outgrow its lengths whatever it asked for.
    """
    rules = request.stop_rules
    token_id = request.output_token_ids[-1]
    if token_id in rules.eos_token_ids and not rules.ignore_eos:
        return FinishReason.STOP, None
    if token_id in rules.stop_token_ids:
        return FinishReason.STOP, token_id
    if request.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    if rules.max_tokens is not None and len(request.output_token_ids) >= rules.max_tokens:
        return FinishReason.LENGTH, None
    return None
