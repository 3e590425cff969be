"""Token embedding, and the output matrix that may share its weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """A table of one row per token; uninitialised until it is loaded."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        table = torch.empty(vocab_size, hidden_size, dtype=dtype)
        self.weight = nn.Parameter(table, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[num_tokens]` → `[num_tokens, hidden]`."""
        return functional.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens: `[rows, hidden]` → `[rows, vocab]` float32."""
        return functional.linear(hidden, self.weight).float()
