"""Rotary position embedding (Su et al. 2021), in the half-split ("neox") pairing.

Dimension `i` of a head is paired with `i + head_dim / 2`; the pair is rotated by
`position * inv_freq[i]`.
"""

import torch
from torch import Tensor


def cos_sin_cache(inv_freq: Tensor, max_position: int, scale: float = 1.0) -> Tensor:
    """Tabulates the rotations.

    Args:
        inv_freq: `[head_dim / 2]` float32, radians per position.
        max_position: rows.
        scale: multiplies cosines and sines (1 but for some context extensions).

    Returns: `[max_position, head_dim]` float32: cosines, then sines.
    """
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scale


def rotary_embedding(positions: Tensor, heads: Tensor, cache: Tensor) -> None:
    """Rotates query and key heads in place.

    Args:
        positions: `[num_tokens]` int64.
        heads: `[num_tokens, num_heads, head_dim]`, query heads and key heads together; may be a
            strided view.
        cache: what `cos_sin_cache` gave, on the same device; low-precision heads are rotated in
            float32.
    """
    heads.copy_(rotary_embedding_reference(positions, heads, cache))


def rotary_embedding_reference(positions: Tensor, heads: Tensor, cache: Tensor) -> Tensor:
    """The oracle of `rotary_embedding`: returns the rotated heads."""
    cos, sin = cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    low, high = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return rotated.to(heads.dtype)
