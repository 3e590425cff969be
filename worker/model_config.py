"""What the model code needs to know of a checkpoint, from whichever file tells it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from services.errors import InvalidArgumentError

_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_ROPE_TYPES = ("default", "linear", "llama3")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings"),
)
_MAX_SIZE = 2**24
_MAX_LAYERS = 1024
"""Far over any model: beyond them the file is corrupt, and building it would take for ever."""
_MALFORMED = (TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading a value of another type or kind raises."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts."""

    rope_type: str = "default"
    """"default" (not at all), "linear" or "llama3"."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """The last three are read for "llama3" only."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, with Hugging Face's names."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> Self:
        """Reads `config.json`, and `generation_config.json` whose end-of-sequence tokens win.

        Errors: InvalidArgumentError naming what is missing, malformed or not supported.
        """
        architectures = config.get("architectures") or []
        if not isinstance(architectures, list) or len(architectures) != 1:
            raise InvalidArgumentError(f"config.json names no single architecture: {architectures}")
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            raise InvalidArgumentError("sliding-window attention is not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise InvalidArgumentError(f"hidden_act {config['hidden_act']} is not supported")
        try:
            return cls(**_hf_fields(str(architectures[0]), config, generation or {}))._checked()
        except KeyError as error:
            raise InvalidArgumentError(f"config.json lacks {error.args[0]}") from error
        except _MALFORMED as error:
            raise InvalidArgumentError(f"config.json is malformed: {error}") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, vocab_size: int, tied: bool) -> Self:
        """Reads GGUF metadata.

        Args:
            metadata: scalar key-value pairs of the file.
            vocab_size: rows of the embedding.
            tied: the file has no output matrix of its own.

        Errors: InvalidArgumentError naming what is missing or not supported.
        """
        name = metadata.get("general.architecture")
        architecture = _GGUF_ARCHITECTURES.get(str(name))
        if architecture is None:
            raise InvalidArgumentError(f"GGUF architecture {name} is not supported")
        if f"{name}.rope.scaling.type" in metadata:
            raise InvalidArgumentError("rope scaling in GGUF files is not supported")
        try:
            fields = _gguf_fields(str(name), architecture, metadata, vocab_size, tied)
            return cls(**fields)._checked()
        except KeyError as error:
            raise InvalidArgumentError(f"GGUF metadata lacks {error.args[0]}") from error
        except _MALFORMED as error:
            raise InvalidArgumentError(f"GGUF metadata is malformed: {error}") from error

    def _checked(self) -> Self:
        """Itself, if a model can have this shape. Errors: ValueError."""
        for name in _SIZES:
            if not 1 <= getattr(self, name) <= _MAX_SIZE:
                raise ValueError(f"{name} is {getattr(self, name)}, not 1 to {_MAX_SIZE}")
        if self.num_layers > _MAX_LAYERS:
            raise ValueError(f"num_layers is {self.num_layers}, over {_MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.num_heads} heads of {self.head_dim} do not share {self.num_kv_heads} "
                "key-value heads, or are odd"
            )
        if not (math.isfinite(self.rms_norm_eps) and 0 < self.rope_theta < math.inf):
            raise ValueError(f"rms_norm_eps {self.rms_norm_eps} or rope_theta {self.rope_theta}")
        if not all(0 <= token < self.vocab_size for token in self.eos_token_ids):
            raise ValueError(f"an end-of-sequence token of {self.eos_token_ids} is no token")
        return self

    def to_json(self) -> str:
        """For a cached copy of a conversion."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Undoes `to_json`. Errors: KeyError, TypeError, ValueError."""
        fields = json.loads(text)
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return cls(**fields)


def _hf_fields(
    architecture: str, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, Any]:
    num_heads = int(config["num_attention_heads"])
    hidden_size = int(config["hidden_size"])
    theta, scaling = _hf_rope(config)
    return {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": int(config["intermediate_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or hidden_size // num_heads),
        "vocab_size": int(config["vocab_size"]),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "eos_token_ids": _token_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
    }


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Reads both spellings: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling`."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(nested.get("rope_theta", config.get("rope_theta", 10000.0)))
    rope_type = str(nested.get("rope_type", nested.get("type", "default")))
    if rope_type not in _ROPE_TYPES:
        raise InvalidArgumentError(f"rope type {rope_type} is not supported")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    given = {name: nested[name] for name in names if nested.get(name) is not None}
    return theta, RopeScaling(rope_type=rope_type, **given)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(token) for token in value)


def _gguf_fields(
    name: str, architecture: str, metadata: Mapping[str, Any], vocab_size: int, tied: bool
) -> dict[str, Any]:
    num_heads = int(metadata[f"{name}.attention.head_count"])
    hidden_size = int(metadata[f"{name}.embedding_length"])
    head_dim = metadata.get(f"{name}.attention.key_length", hidden_size // num_heads)
    return {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata[f"{name}.feed_forward_length"]),
        "num_layers": int(metadata[f"{name}.block_count"]),
        "num_heads": num_heads,
        "num_kv_heads": int(metadata.get(f"{name}.attention.head_count_kv", num_heads)),
        "head_dim": int(head_dim),
        "vocab_size": vocab_size,
        "max_position_embeddings": int(metadata[f"{name}.context_length"]),
        "rms_norm_eps": _shortest(metadata[f"{name}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(metadata.get(f"{name}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "eos_token_ids": _token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
    }


def _shortest(value: float) -> float:
    """Undoes GGUF's rounding to float32, which would make 1e-5 a different double."""
    return float(f"{value:.7g}")
