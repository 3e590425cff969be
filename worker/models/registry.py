"""Hugging Face architecture names → model classes."""

from typing import Protocol

import torch
from torch import Tensor

from services.errors import InvalidArgumentError
from worker.loader.weights import WeightTargets
from worker.model_config import ModelConfig
from worker.models.llama import LlamaForCausalLM


class CausalLM(Protocol):
    """What the model runner asks of model code."""

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """`[num_tokens]` int64 each → `[num_tokens, hidden]`; inside a forward context."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` → `[rows, vocab]` float32."""
        ...

    def weight_targets(self) -> WeightTargets:
        """Where each tensor of a checkpoint goes."""
        ...


_MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    # without a sliding window, which the configuration refuses, Mistral is Llama
    "MistralForCausalLM": LlamaForCausalLM,
}


def build_model(config: ModelConfig, dtype: torch.dtype) -> CausalLM:
    """Makes the model of a configuration, its weights uninitialised.

    Errors: InvalidArgumentError for an architecture that is not built.
    """
    model_class = _MODELS.get(config.architecture)
    if model_class is None:
        known = ", ".join(_MODELS)
        raise InvalidArgumentError(
            f"architecture {config.architecture} is not supported; these are: {known}"
        )
    return model_class(config, dtype)
