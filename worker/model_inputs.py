"""The flat tensors of one forward, from rows of the persistent batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.attention.backend import AttentionBatch
from worker.input_batch import InputBatch
from worker.step import IntArray


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward: decodes (one new token) first, then all others."""

    rows: IntArray
    """`[num_requests]` rows of the batch."""
    token_ids: Tensor
    """`[num_tokens]` int64."""
    positions: Tensor
    """`[num_tokens]` int64."""
    attention: AttentionBatch
    sampled: IntArray
    """Requests (places in `rows`) whose last known token is computed here: they are sampled."""

    @property
    def logits_indices(self) -> Tensor:
        """`[num_sampled]` int64: the tokens whose logits are wanted."""
        return torch.from_numpy(self.attention.query_start_loc[1:][self.sampled] - 1)


def prepare_inputs(batch: InputBatch, rows: IntArray, num_scheduled: IntArray) -> ModelInputs:
    """Gathers the next `num_scheduled[i]` tokens of `rows[i]`.

    Only the first KV cache group's block table is used: all models here have one group.
    """
    order = np.argsort(num_scheduled != 1, kind="stable")
    rows, num_scheduled = rows[order], num_scheduled[order]
    starts = batch.num_computed_tokens[rows]
    seq_lens = starts + num_scheduled
    query_start_loc = np.concatenate(([0], np.cumsum(num_scheduled)))
    row_of_token = np.repeat(rows, num_scheduled)
    offsets = np.repeat(starts - query_start_loc[:-1], num_scheduled)
    positions = np.arange(query_start_loc[-1], dtype=np.int64) + offsets

    block_size = batch.shape.block_size
    table = batch.block_tables[0].ids
    blocks = table[row_of_token, positions // block_size].astype(np.int64)
    width = -(-int(seq_lens.max()) // block_size)
    attention = AttentionBatch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=table[rows, :width].astype(np.int64),
        slot_mapping=blocks * block_size + positions % block_size,
    )
    return ModelInputs(
        rows=rows,
        token_ids=torch.from_numpy(batch.token_ids[row_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        attention=attention,
        sampled=np.flatnonzero(seq_lens == batch.num_tokens[rows]),
    )
