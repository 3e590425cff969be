"""What the engine is told, what it learns, and how it is."""

from dataclasses import dataclass
from enum import Enum

from enginecore.kv_cache_config import CacheOptions, KVCacheConfig, ModelFacts
from enginecore.scheduler_config import SchedulerConfig


class EngineState(Enum):
    """Whether the engine serves."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True, frozen=True)
class EngineOptions:
    """What the operator asked for; `scheduler.max_model_len` is replaced by what fits."""

    model: str
    scheduler: SchedulerConfig
    cache: CacheOptions
    enable_prefix_caching: bool = True


@dataclass(slots=True, frozen=True)
class EngineFacts:
    """What is known once the workers are ready."""

    model: ModelFacts
    cache: KVCacheConfig
