"""Log-probabilities of tokens, by the model's own distribution: before any edit or temperature."""

import torch
from torch import Tensor

from worker.step import LogprobColumns


def append_logprobs(
    columns: LogprobColumns, handle: int, logits: Tensor, token_ids: Tensor, num_alternatives: int
) -> None:
    """Adds consecutive positions of one request.

    Args:
        columns: what to extend.
        handle: the request.
        logits: `[num_positions, vocab]` float32, unedited.
        token_ids: `[num_positions]` int64, the sampled or given tokens.
        num_alternatives: the most likely tokens to add after each, which may name it again; at most
            the vocabulary.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(-1, token_ids[:, None])
    own_rank = (logprobs > own).sum(-1, keepdim=True) + 1
    count = min(num_alternatives, logits.shape[-1])
    top, top_ids = logprobs.topk(count, dim=-1)
    top_rank = torch.arange(1, count + 1).expand(len(logits), -1)
    columns.handles += [handle] * len(logits)
    columns.num_candidates += [1 + count] * len(logits)
    columns.token_ids += torch.cat((token_ids[:, None], top_ids), -1).flatten().tolist()
    columns.logprobs += torch.cat((own, top), -1).flatten().tolist()
    columns.ranks += torch.cat((own_rank, top_rank), -1).flatten().tolist()
