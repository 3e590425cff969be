"""Rotary position embedding with its table, shared by all layers of a model."""

import math

import torch
from torch import Tensor, nn

from kernels.rotary_embedding import cos_sin_cache, rotary_embedding
from worker.model_config import ModelConfig, RopeScaling


class RotaryEmbedding(nn.Module):
    """Rotates query and key heads by their positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        table = cos_sin_cache(inv_freq, config.max_position_embeddings)
        self.register_buffer("cache", table, persistent=False)

    def forward(self, positions: Tensor, heads: Tensor) -> None:
        """Rotates `[num_tokens, num_heads, head_dim]` in place; positions are int64."""
        rotary_embedding(positions, heads, self.get_buffer("cache"))


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position of each pair: `[head_dim / 2]` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / theta**exponents
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling)
    return plain


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: slow pairs are stretched, fast ones kept, those between interpolated."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share = ((turns - scaling.low_freq_factor) / band).clamp(0, 1)
    return plain * (kept_share + (1 - kept_share) / scaling.factor)
