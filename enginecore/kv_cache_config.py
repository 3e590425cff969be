"""How large the KV cache is and how long a sequence may get."""

import logging
from dataclasses import dataclass
from typing import Final

from services.errors import InvalidArgumentError, ResourceExhaustedError

log = logging.getLogger(__name__)

DEFAULT_CPU_KV_CACHE_BYTES: Final = 384 * 1024 * 1024
"""On a CPU the cache shares memory with everything else, so it does not take all that is there."""


@dataclass(slots=True, frozen=True)
class KVCacheGroupSpec:
    """Layers that share block tables; `bytes_per_token` is over all of them."""

    num_layers: int
    bytes_per_token: int
    sliding_window: int | None = None


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """What the engine knows of the loaded model."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    weight_bytes: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]


@dataclass(slots=True, frozen=True)
class WorkerFacts:
    """What the workers have: the smallest memory of all, the first one's device."""

    device: str
    model: ModelFacts
    available_kv_cache_bytes: int


@dataclass(slots=True, frozen=True)
class CacheOptions:
    """What the operator asked for. None: decide by what is there."""

    block_size: int = 16
    max_model_len: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None


@dataclass(slots=True, frozen=True)
class KVCacheConfig:
    """The decision; `num_blocks` includes the null block."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_groups: int

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that the whole cache can hold."""
        return (self.num_blocks - 1) // self.num_groups * self.block_size


def plan_kv_cache(facts: WorkerFacts, options: CacheOptions) -> KVCacheConfig:
    """Decides the number of blocks and the context length.

    Errors: ResourceExhaustedError (not even one block fits), InvalidArgumentError (an explicit
    max_model_len that the model or the cache cannot hold; the message has both lengths).
    """
    num_blocks = _num_blocks(facts, options)
    num_groups = len(facts.model.kv_cache_groups)
    if num_blocks - 1 < num_groups:
        raise ResourceExhaustedError(
            f"the KV cache memory holds {num_blocks} blocks; it takes at least {num_groups + 1}"
        )
    config = KVCacheConfig(num_blocks, options.block_size, 0, num_groups)
    longest = min(facts.model.max_position_embeddings, config.capacity_tokens)
    if options.max_model_len is None and longest < facts.model.max_position_embeddings:
        log.info(
            "max_model_len is %d, which is what the KV cache holds; the model could do %d",
            longest,
            facts.model.max_position_embeddings,
        )
    if options.max_model_len is not None and options.max_model_len > longest:
        raise InvalidArgumentError(
            f"max_model_len is {options.max_model_len} tokens, but the model was trained for "
            f"{facts.model.max_position_embeddings} and the KV cache holds "
            f"{config.capacity_tokens}: lower it or give kv_cache_memory_bytes",
            param="max_model_len",
        )
    max_model_len = options.max_model_len if options.max_model_len is not None else longest
    return KVCacheConfig(num_blocks, options.block_size, max_model_len, num_groups)


def _num_blocks(facts: WorkerFacts, options: CacheOptions) -> int:
    if options.num_gpu_blocks_override is not None:
        return options.num_gpu_blocks_override
    num_bytes = facts.available_kv_cache_bytes
    if options.kv_cache_memory_bytes is not None:
        num_bytes = options.kv_cache_memory_bytes
    elif facts.device == "cpu":
        num_bytes = min(num_bytes, DEFAULT_CPU_KV_CACHE_BYTES)
    bytes_per_token = sum(group.bytes_per_token for group in facts.model.kv_cache_groups)
    return num_bytes // (options.block_size * bytes_per_token)
