"""Linear layers, those that merge several matrices of a checkpoint included."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.loader.weights import WeightTargets


class Linear(nn.Module):
    """One matrix, with or without a bias; uninitialised until it is loaded."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = _empty((out_features, in_features), dtype)
        self.bias = _empty((out_features,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, in]` → `[num_tokens, out]`."""
        return functional.linear(x, self.weight, self.bias)

    def weight_targets(self, name: str) -> WeightTargets:
        """Where the checkpoint's tensors of the layer `name` go."""
        return self._slices(name, 0, self.weight.shape[0])

    def _slices(self, name: str, start: int, rows: int) -> WeightTargets:
        targets = {f"{name}.weight": self.weight.data[start : start + rows]}
        if self.bias is not None:
            targets[f"{name}.bias"] = self.bias.data[start : start + rows]
        return targets


class MergedLinear(Linear):
    """Several matrices with the same input as one, so that one product computes them all.

    Args:
        in_features: of each.
        parts: name in the checkpoint and output rows of each, in output order.
        bias: whether each has one.
        dtype: of the weights.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype)
        self._parts = parts

    def weight_targets(self, name: str) -> WeightTargets:
        """Where the parts go; `name` is what comes before their own names."""
        targets: WeightTargets = {}
        start = 0
        for part, rows in self._parts.items():
            targets |= self._slices(f"{name}.{part}", start, rows)
            start += rows
        return targets


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
