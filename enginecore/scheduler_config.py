"""The scheduler's limits."""

from dataclasses import dataclass

from enginecore.admission import NO_LIMITS, AdmissionLimits


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """The scheduler's limits; lengths are in tokens. A threshold of 0 is off."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    limits: AdmissionLimits = NO_LIMITS
