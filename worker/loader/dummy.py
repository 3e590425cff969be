"""Random weights, for benchmarks that need a model's shape but not its words."""

from collections.abc import Iterator

import torch

from worker.loader.weights import WeightTargets
from worker.model_config import ModelConfig

_SPREAD = 0.02


class DummySource:
    """Seeded random weights: small normal ones, norm weights of one, biases of zero."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self._generator = torch.Generator().manual_seed(seed)

    def tensors(self, targets: WeightTargets) -> Iterator[str]:
        """Fills the targets in order of their names, so that a seed gives one model."""
        for name in sorted(targets):
            target = targets[name]
            if name.endswith("norm.weight"):
                target.fill_(1.0)
            elif name.endswith(".bias"):
                target.zero_()
            else:
                target.copy_(torch.randn(target.shape, generator=self._generator) * _SPREAD)
            yield name
