"""Paged attention as a layer: reads the batch from the forward context."""

from torch import Tensor, nn

from worker.forward_context import get_forward_context


class Attention(nn.Module):
    """One layer's attention over its part of the KV cache."""

    def __init__(self, layer_index: int, head_dim: int) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._scale = head_dim**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends.

        Args:
            query: `[num_tokens, num_heads, head_dim]`, rotated.
            key: `[num_tokens, num_kv_heads, head_dim]`, rotated.
            value: like `key`.

        Returns: `[num_tokens, num_heads * head_dim]`.
        """
        context = get_forward_context()
        cache = context.kv_caches[self._layer_index]
        return context.backend.forward(query, key, value, cache, self._scale)
