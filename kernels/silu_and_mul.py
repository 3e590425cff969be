"""The gate of a SwiGLU feed-forward layer (Shazeer 2020)."""

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """Multiplies the second half of each row by the SiLU of the first.

    Args:
        x: `[num_tokens, 2 * intermediate]`: gate, then up.

    Returns: `[num_tokens, intermediate]`.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """The oracle of `silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
