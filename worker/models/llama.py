"""The Llama family (Llama, SmolLM2, and Mistral without a sliding window)."""

import torch
from torch import Tensor, nn

from kernels.silu_and_mul import silu_and_mul
from worker.layers.attention import Attention
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear, MergedLinear
from worker.layers.rms_norm import RmsNorm
from worker.layers.rotary import RotaryEmbedding
from worker.loader.weights import WeightTargets
from worker.model_config import ModelConfig


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(
        self, config: ModelConfig, layer_index: int, rotary: RotaryEmbedding, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        query_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows},
            bias=bias,
            dtype=dtype,
        )
        self.o_proj = Linear(query_rows, config.hidden_size, bias=bias, dtype=dtype)
        self.attention = Attention(layer_index, config.head_dim)
        self._rotary = rotary

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        """`[num_tokens, hidden]` → the same."""
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self._head_dim))
        num_rotated = self._num_heads + self._num_kv_heads
        self._rotary(positions, heads[:, :num_rotated])
        query = heads[:, : self._num_heads]
        key = heads[:, self._num_heads : num_rotated]
        attended: Tensor = self.attention(query, key, heads[:, num_rotated:])
        out: Tensor = self.o_proj(attended)
        return out

    def weight_targets(self, name: str) -> WeightTargets:
        """Where the checkpoint's tensors of this part go."""
        return self.qkv_proj.weight_targets(name) | self.o_proj.weight_targets(f"{name}.o_proj")


class LlamaMlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, config.hidden_size, bias=bias, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[num_tokens, hidden]` → the same."""
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
        return out

    def weight_targets(self, name: str) -> WeightTargets:
        """Where the checkpoint's tensors of this part go."""
        gate_up = self.gate_up_proj.weight_targets(name)
        return gate_up | self.down_proj.weight_targets(f"{name}.down_proj")


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm that also adds the residual."""

    def __init__(
        self, config: ModelConfig, layer_index: int, rotary: RotaryEmbedding, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.self_attn = LlamaAttention(config, layer_index, rotary, dtype)
        self.post_attention_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.mlp = LlamaMlp(config, dtype)

    def forward(
        self, positions: Tensor, hidden: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns this layer's output, not yet added, and the residual."""
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(positions, hidden)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual

    def weight_targets(self, name: str) -> WeightTargets:
        """Where the checkpoint's tensors of this layer go."""
        norms = {
            f"{name}.input_layernorm.weight": self.input_layernorm.weight.data,
            f"{name}.post_attention_layernorm.weight": self.post_attention_layernorm.weight.data,
        }
        attention = self.self_attn.weight_targets(f"{name}.self_attn")
        return norms | attention | self.mlp.weight_targets(f"{name}.mlp")


class LlamaForCausalLM(nn.Module):
    """The whole model. Weights are uninitialised until `weight_targets` are filled."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i, rotary, dtype) for i in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        )

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Runs a flat batch inside a forward context.

        Args:
            token_ids: `[num_tokens]` int64.
            positions: `[num_tokens]` int64, each token's place in its request.

        Returns: `[num_tokens, hidden]`, normalised.
        """
        hidden: Tensor = self.embed_tokens(token_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        if residual is None:
            return self.norm(hidden)  # type: ignore[no-any-return]
        return self.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: `[rows, hidden]` → `[rows, vocab]` float32."""
        return self.lm_head.logits(hidden)

    def weight_targets(self) -> WeightTargets:
        """Where each tensor of a checkpoint goes."""
        targets = {
            "model.embed_tokens.weight": self.embed_tokens.weight.data,
            "model.norm.weight": self.norm.weight.data,
        }
        if self.lm_head is not self.embed_tokens:
            targets["lm_head.weight"] = self.lm_head.weight.data
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{i}")
        return targets
