"""Attention of a flat batch of new tokens over a paged KV cache (its layout: see the package).

The new tokens' keys and values must be in the cache already. Requests with one new token (decodes)
come first in the batch. On CPU:

- decodes of similar length are gathered together with one `index_select` per cache and padded to
  the longest of their group; the query heads that share a KV head are folded into the query
  length, so that the cache is read once per KV head;
- each request with more new tokens (a prefill chunk) is attended alone, with the causal mask
  shifted by what was computed before it.

What depends on the batch alone is worked out once per step (`plan_paged_attention`), not per layer.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

IntArray = npt.NDArray[np.int64]

# A group is padded to at most this multiple of its shortest context: gathering costs as much as
# attending, so padding is waste; splitting finer costs a call of each op per layer.
_MAX_PADDING_RATIO = 1.5
_MIN_GROUP_BLOCKS = 8


@dataclass(slots=True)
class DecodeGroup:
    """Decodes that are attended together."""

    rows: Tensor | None
    """`[group]` int64 positions in the batch; None: all tokens of the batch, in order."""
    block_ids: Tensor
    """`[group * blocks]` int64, padded with the null block."""
    mask: Tensor
    """`[group, 1, 1, blocks * block_size]`, 0 or minus infinity, in the query's dtype."""


@dataclass(slots=True)
class PrefillChunk:
    """A request with more than one new token."""

    start: int
    end: int
    """Its tokens in the batch."""
    seq_len: int
    """Its tokens up to the end of the chunk."""
    block_ids: Tensor
    """`[ceil(seq_len / block_size)]` int64."""
    mask: Tensor | None
    """`[new tokens, seq_len]`, 0 or minus infinity; None: nothing was computed before it."""


@dataclass(slots=True)
class PagedAttentionPlan:
    """What all layers of a step share."""

    decode_groups: list[DecodeGroup] = field(default_factory=list)
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)


def plan_paged_attention(
    query_start_loc: IntArray,
    seq_lens: IntArray,
    block_table: IntArray,
    block_size: int,
    dtype: torch.dtype,
) -> PagedAttentionPlan:
    """Prepares `paged_attention` for one batch.

    Args:
        query_start_loc: `[num_requests + 1]`, where each request's new tokens start in the batch;
            requests with one new token come first.
        seq_lens: `[num_requests]`, tokens of each request, the new ones included.
        block_table: `[num_requests, max_blocks]`, the blocks of each request.
        block_size: tokens per block.
        dtype: of the query and the cache.
    """
    query_lens = np.diff(query_start_loc)
    num_decodes = int(np.count_nonzero(query_lens == 1))
    plan = PagedAttentionPlan()
    for rows in _group_by_length(-(-seq_lens[:num_decodes] // block_size)):
        plan.decode_groups.append(
            _plan_decodes(rows, seq_lens, block_table, block_size, dtype, len(query_lens))
        )
    for i in range(num_decodes, len(query_lens)):
        start, end, seq_len = int(query_start_loc[i]), int(query_start_loc[i + 1]), int(seq_lens[i])
        blocks = torch.from_numpy(block_table[i, : -(-seq_len // block_size)].astype(np.int64))
        mask = _chunk_mask(end - start, seq_len, dtype) if seq_len > end - start else None
        plan.prefill_chunks.append(PrefillChunk(start, end, seq_len, blocks, mask))
    return plan


def _group_by_length(num_blocks: IntArray) -> list[IntArray]:
    """Splits decodes into groups of similar context length, shortest first."""
    groups: list[IntArray] = []
    order = np.argsort(num_blocks, kind="stable")
    lengths = num_blocks[order]
    first = 0
    while first < len(order):
        longest = max(_MIN_GROUP_BLOCKS, lengths[first] * _MAX_PADDING_RATIO)
        last = int(np.searchsorted(lengths, longest, side="right"))
        groups.append(np.sort(order[first:last]))
        first = last
    return groups


def _plan_decodes(
    rows: IntArray,
    seq_lens: IntArray,
    block_table: IntArray,
    block_size: int,
    dtype: torch.dtype,
    batch_size: int,
) -> DecodeGroup:
    lens = seq_lens[rows]
    width = -(-int(lens.max()) // block_size)
    used = np.arange(width) * block_size < lens[:, None]
    blocks = np.where(used, block_table[rows, :width], 0).astype(np.int64)
    beyond = np.arange(width * block_size) >= lens[:, None]
    mask = torch.zeros(beyond.shape, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(beyond), float("-inf"))
    return DecodeGroup(
        rows=None if len(rows) == batch_size else torch.from_numpy(rows.astype(np.int64)),
        block_ids=torch.from_numpy(blocks.reshape(-1)),
        mask=mask[:, None, None, :],
    )


def _chunk_mask(num_new: int, seq_len: int, dtype: torch.dtype) -> Tensor:
    """Causal mask of a chunk's tokens over all tokens up to its end."""
    mask = torch.full((num_new, seq_len), float("-inf"), dtype=dtype)
    return mask.triu_(seq_len - num_new + 1)


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: PagedAttentionPlan, scale: float
) -> Tensor:
    """Attends each new token to its request's tokens up to itself.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; may be a strided view. Head `h` reads KV head
            `h // (num_heads / num_kv_heads)`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the dtype of `query`.
        value_cache: like `key_cache`.
        plan: of this batch.
        scale: multiplies the scores.

    Returns: `[num_tokens, num_heads * head_dim]`.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in plan.decode_groups:
        if group.rows is None:
            out = _attend_decodes(query, key_cache, value_cache, group, scale)
        else:
            chosen = query.index_select(0, group.rows)
            attended = _attend_decodes(chosen, key_cache, value_cache, group, scale)
            out.index_copy_(0, group.rows, attended)
    for chunk in plan.prefill_chunks:
        new = query[chunk.start : chunk.end]
        out[chunk.start : chunk.end] = _attend_chunk(new, key_cache, value_cache, chunk, scale)
    return out.flatten(1)


def _attend_decodes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scale: float
) -> Tensor:
    count, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]

    def gather(cache: Tensor) -> Tensor:
        rows = cache.flatten(1).index_select(0, group.block_ids)
        return rows.view(count, -1, num_kv_heads, head_dim).transpose(1, 2)

    folded = query.reshape(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = functional.scaled_dot_product_attention(
        folded, gather(key_cache), gather(value_cache), attn_mask=group.mask, scale=scale
    )
    return attended.reshape(count, num_heads, head_dim)


def _attend_chunk(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, chunk: PrefillChunk, scale: float
) -> Tensor:
    num_new, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    per_kv_head = num_heads // num_kv_heads

    def gather(cache: Tensor) -> Tensor:
        rows = cache.flatten(1).index_select(0, chunk.block_ids)
        tokens = rows.view(-1, num_kv_heads, head_dim)[: chunk.seq_len]
        # a KV head serves its query heads by stride 0, not by copies
        return tokens.transpose(0, 1).unsqueeze(1).expand(-1, per_kv_head, -1, -1)

    heads = query.reshape(num_new, num_kv_heads, per_kv_head, head_dim).permute(1, 2, 0, 3)
    attended = functional.scaled_dot_product_attention(
        heads,
        gather(key_cache),
        gather(value_cache),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(num_new, num_heads, head_dim)


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: IntArray,
    seq_lens: IntArray,
    block_table: IntArray,
    scale: float,
) -> Tensor:
    """The oracle of `paged_attention`: token by token, head by head, in float32."""
    block_size, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    out = torch.empty(query.shape, dtype=torch.float32)
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[i]), int(query_start_loc[i + 1])
        slots = [(block_table[i, t // block_size], t % block_size) for t in range(seq_len)]
        keys = torch.stack([key_cache[b, o] for b, o in slots]).float()
        values = torch.stack([value_cache[b, o] for b, o in slots]).float()
        for token in range(start, end):
            visible = seq_len - (end - token) + 1
            for head in range(query.shape[1]):
                kv_head = head * num_kv_heads // query.shape[1]
                scores = keys[:visible, kv_head] @ query[token, head].float() * scale
                out[token, head] = scores.softmax(0) @ values[:visible, kv_head]
    return out.to(query.dtype).flatten(1)
