"""Attention on CPU, over the torch implementations of the kernels."""

import mmap

import torch
from torch import Tensor

from kernels.paged_attention import PagedAttentionPlan, paged_attention, plan_paged_attention
from kernels.reshape_and_cache import reshape_and_cache
from worker.attention.backend import AttentionBatch, KvLayerCache


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor over an anonymous mapping; `torch.zeros` would write, and so own, every page.

    Errors: RuntimeError when the address space is short.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)
    except OSError as error:
        raise RuntimeError("cannot map memory") from error


class CpuAttention:
    """The CPU's AttentionBackend."""

    def __init__(self) -> None:
        self._plan = PagedAttentionPlan()
        self._slot_mapping = torch.empty(0, dtype=torch.int64)

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvLayerCache:
        """Allocates lazily: pages take memory only once their blocks are used."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return KvLayerCache(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype))

    def begin_step(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        """Groups the decodes and builds the masks."""
        self._slot_mapping = torch.from_numpy(batch.slot_mapping)
        self._plan = plan_paged_attention(
            batch.query_start_loc, batch.seq_lens, batch.block_table, block_size, dtype
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KvLayerCache, scale: float
    ) -> Tensor:
        """Stores, then attends; see AttentionBackend."""
        reshape_and_cache(key, value, cache.key, cache.value, self._slot_mapping)
        return paged_attention(query, cache.key, cache.value, self._plan, scale)
