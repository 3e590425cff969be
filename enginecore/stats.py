"""Counts that operators and routers read."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What the scheduler counts from the process's start on. They never fall.

    Prefix cache queries and hits are in tokens, counted once per request, when it is first
    scheduled; look-ups after a preemption are counted apart.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preempted_prefix_cache_queries: int = 0
    preempted_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_rejected_reqs: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def count_look_up(self, num_queried: int, num_hit: int, resumed: bool) -> None:
        """Counts a scheduled request's prefix cache look-up."""
        if resumed:
            self.preempted_prefix_cache_queries += num_queried
            self.preempted_prefix_cache_hits += num_hit
        else:
            self.prefix_cache_queries += num_queried
            self.prefix_cache_hits += num_hit


@dataclass(slots=True, frozen=True)
class SchedulerStats:
    """The state of the scheduler after a step."""

    step: int
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage_ratio: float
    num_blocks: int
    num_free_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_scheduled_tokens: int
