"""A GGUF file, dequantised through the `gguf` library.

GGUF stores the rows of q and k so that rotary pairs are neighbours; the model code pairs the halves
of a head, as Hugging Face checkpoints do, so those rows are put back in that order.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from services.errors import InvalidArgumentError
from worker.loader.weights import WeightTargets, target_of
from worker.model_config import ModelConfig

_MAGIC = b"GGUF"
_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_TOP_LEVEL = {
    _EMBEDDING: "model.embed_tokens.weight",
    _OUTPUT: "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class GgufFile:
    """An open GGUF file. Errors: InvalidArgumentError naming a corrupt or unsupported file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise InvalidArgumentError(f"corrupt model file {path}: not a GGUF file")
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # the library raises whatever a bad offset leads to
            raise InvalidArgumentError(f"corrupt GGUF file {path}: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config()
        self._names = {name: self._hf_name(name) for name in self._tensors}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its Hugging Face name, in the order of `dequantised`."""
        # GGUF lists dimensions innermost first
        return {
            self._names[name]: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def dequantised(self) -> Iterator[tuple[str, Tensor]]:
        """Gives each tensor in float32 by its Hugging Face name, one at a time."""
        for name, tensor in self._tensors.items():
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except (ValueError, NotImplementedError) as error:
                raise InvalidArgumentError(f"{self._path}: tensor {name}: {error}") from error
            # a tensor stored in float32 is a read-only view of the file, which torch does not take
            weight = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
            yield self._names[name], self._in_hf_order(name, weight)

    def tensors(self, targets: WeightTargets) -> Iterator[str]:
        """Dequantises tensor after tensor into the targets."""
        for name, weight in self.dequantised():
            target_of(targets, name, tuple(weight.shape), str(self._path)).copy_(weight)
            yield name

    def _read_config(self) -> ModelConfig:
        if _EMBEDDING not in self._tensors:
            raise InvalidArgumentError(
                f"{self._path}: the model files lack the tensor {_EMBEDDING}"
            )
        # arrays (the tokenizer's) are not needed here, and slow to read
        scalars: dict[str, Any] = {
            name: field.contents()
            for name, field in self._reader.fields.items()
            if field.types and field.types[0] != GGUFValueType.ARRAY
        }
        vocab_size = int(self._tensors[_EMBEDDING].shape[1])
        tied = _OUTPUT not in self._tensors
        try:
            return ModelConfig.from_gguf(scalars, vocab_size=vocab_size, tied=tied)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{self._path}: {error.message}") from error

    def _hf_name(self, name: str) -> str:
        if name in _TOP_LEVEL:
            return _TOP_LEVEL[name]
        pieces = name.split(".")
        if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _PARTS:
            return f"model.layers.{pieces[1]}.{_PARTS[pieces[2]]}.{pieces[3]}"
        raise InvalidArgumentError(f"{self._path}: the model has no place for the tensor {name}")

    def _in_hf_order(self, name: str, weight: Tensor) -> Tensor:
        if ".attn_q." in name:
            return _halves_apart(weight, self.config.num_heads)
        if ".attn_k." in name:
            return _halves_apart(weight, self.config.num_kv_heads)
        return weight


def _halves_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head from interleaved pairs to one half after the other."""
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)
