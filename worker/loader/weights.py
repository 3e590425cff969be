"""What every loader hands to the model code."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from services.errors import InvalidArgumentError
from worker.model_config import ModelConfig

WeightTargets = dict[str, Tensor]
"""Where each tensor of a checkpoint belongs: Hugging Face name → (a slice of) a parameter."""

Progress = Callable[[int, int], None]
"""Told (loaded bytes, total bytes) as weights come into place."""

FLOAT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes that weights may have, by the names used in configuration."""


class WeightSource(Protocol):
    """A checkpoint."""

    config: ModelConfig

    def tensors(self, targets: WeightTargets) -> Iterator[str]:
        """Writes each tensor into its target, one at a time, and yields its name afterwards.

        Errors: InvalidArgumentError naming the file or tensor at fault.
        """
        ...


def load_into(source: WeightSource, targets: WeightTargets, progress: Progress) -> None:
    """Fills a model.

    Errors: InvalidArgumentError when a tensor is missing, unknown, or of another shape.
    """
    total = sum(target.nbytes for target in targets.values())
    loaded = 0
    missing = set(targets)
    for name in source.tensors(targets):
        missing.discard(name)
        loaded += targets[name].nbytes
        progress(loaded, total)
    if missing:
        raise InvalidArgumentError(f"the model files lack the tensor {min(missing)}")


def target_of(targets: WeightTargets, name: str, shape: tuple[int, ...], file: str) -> Tensor:
    """Finds a tensor's place. Errors: InvalidArgumentError for an unknown name or other shape."""
    target = targets.get(name)
    if target is None:
        raise InvalidArgumentError(f"{file}: the model has no place for the tensor {name}")
    if tuple(target.shape) != shape:
        raise InvalidArgumentError(
            f"{file}: tensor {name} has shape {shape}, expected {tuple(target.shape)}"
        )
    return target
