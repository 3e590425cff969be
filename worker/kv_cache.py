"""The KV cache of all layers."""

from dataclasses import dataclass

import torch

from services.errors import InvalidArgumentError, ResourceExhaustedError
from worker.attention.backend import AttentionBackend, IntArray, KvLayerCache
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class KvCacheShape:
    """How large the cache and the batch are."""

    num_blocks: int
    """Block 0, the null block, included."""
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Tokens of the longest sequence."""
    max_num_seqs: int
    """Requests of the largest batch."""
    max_num_batched_tokens: int
    """Tokens of the largest step."""

    def check(self) -> None:
        """Errors: InvalidArgumentError naming a size that is zero."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} must be at least 1", param=name)


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers, block by block."""

    layers: list[KvLayerCache]
    shape: KvCacheShape

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(layer.num_bytes for layer in self.layers)

    def scrub(self, block_ids: IntArray) -> None:
        """Replaces what is not finite in some blocks, so that padding cannot spread it."""
        index = torch.from_numpy(block_ids)
        for layer in self.layers:
            for part in (layer.key, layer.value):
                part[index] = part[index].nan_to_num_(0.0, 0.0, 0.0)


def allocate_kv_cache(
    config: ModelConfig, shape: KvCacheShape, backend: AttentionBackend, dtype: torch.dtype
) -> KvCache:
    """Allocates the cache.

    Errors: InvalidArgumentError for a zero size, ResourceExhaustedError when it does not fit.
    """
    shape.check()
    heads, head_dim = config.num_kv_heads, config.head_dim
    try:
        layers = [
            backend.allocate(shape.num_blocks, shape.block_size, heads, head_dim, dtype)
            for _ in range(config.num_layers)
        ]
    except (RuntimeError, MemoryError) as error:
        raise ResourceExhaustedError(
            f"a KV cache of {shape.num_blocks} blocks of {shape.block_size} tokens does not fit"
        ) from error
    return KvCache(layers, shape)
