"""RMS normalisation, fused with the residual add where there is one."""

import torch
from torch import Tensor, nn

from kernels.rms_norm import fused_add_rms_norm, rms_norm


class RmsNorm(nn.Module):
    """A norm layer; uninitialised until it is loaded."""

    def __init__(self, hidden_size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype), requires_grad=False)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `[num_tokens, hidden]`."""
        return rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds `x` into `residual` in place; returns the normalised sum, and the sum."""
        return fused_add_rms_norm(x, residual, self.weight, self._eps)
