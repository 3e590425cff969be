"""Root-mean-square normalisation (Zhang & Sennrich 2019), alone and fused with a residual add."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales each row to unit root mean square, then by `weight`.

    Args:
        x: `[..., hidden]`, any float dtype; the statistics are taken in float32.
        weight: `[hidden]`, the dtype of `x`.
        eps: added to the mean square.

    Returns: a new tensor like `x`.
    """
    return rms_norm_reference(x, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Adds `x` into `residual` in place, then normalises the sum.

    Args:
        x: `[..., hidden]`, what the previous layer computed.
        residual: like `x`; overwritten by the sum.
        weight: `[hidden]`.
        eps: added to the mean square.

    Returns: the normalised sum, and `residual`.
    """
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The oracle of `rms_norm`: rounds to the dtype of `x` before the weight, as peers do."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
