"""The seam between model code and a device's attention."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvLayerCache:
    """One layer's part of the KV cache; the layout is the backend's."""

    key: Tensor
    value: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of both tensors."""
        return self.key.nbytes + self.value.nbytes


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's requests as attention sees them: decodes (one new token) before all others."""

    query_start_loc: IntArray
    """`[num_requests + 1]`: where each request's new tokens start."""
    seq_lens: IntArray
    """`[num_requests]`: tokens of each request, the new ones included."""
    block_table: IntArray
    """`[num_requests, max_blocks]`: blocks of each request."""
    slot_mapping: IntArray
    """`[num_tokens]`: where each new token's key and value go."""


class AttentionBackend(Protocol):
    """One device's attention. Used by the compute thread only."""

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KvLayerCache:
        """Allocates one layer's cache, zeroed. Errors: RuntimeError when it does not fit."""
        ...

    def begin_step(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        """Prepares what all layers of the next forward share."""
        ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KvLayerCache, scale: float
    ) -> Tensor:
        """Stores the new tokens' keys and values, then attends.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            key: `[num_tokens, num_kv_heads, head_dim]`.
            value: like `key`.
            cache: this layer's.
            scale: multiplies the scores.

        Returns: `[num_tokens, num_heads * head_dim]`.
        """
        ...
