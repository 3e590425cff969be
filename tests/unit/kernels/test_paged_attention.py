"""Paged attention against the token-by-token oracle, on random batches."""

import numpy as np
import pytest
import torch

from kernels.paged_attention import (
    paged_attention,
    paged_attention_reference,
    plan_paged_attention,
)

HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5


def compare(
    lens: list[tuple[int, int]],
    *,
    block_size: int = 4,
    heads: tuple[int, int] = (6, 2),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Checks one batch; `lens` has (new tokens, tokens in all) per request, decodes first."""
    rng = np.random.default_rng(len(lens))
    torch.manual_seed(1)
    blocks_of = [-(-total // block_size) for _, total in lens]
    num_blocks = sum(blocks_of) + 1
    caches = [torch.randn(num_blocks, block_size, heads[1], HEAD_DIM).to(dtype) for _ in range(2)]
    ids = rng.permutation(np.arange(1, num_blocks))
    table = np.zeros((len(lens), max(blocks_of)), dtype=np.int64)
    for row, count in enumerate(blocks_of):
        start = sum(blocks_of[:row])
        table[row, :count] = ids[start : start + count]
    starts = np.concatenate(([0], np.cumsum([new for new, _ in lens])))
    seq_lens = np.array([total for _, total in lens], dtype=np.int64)
    # a strided view, as the model's merged projection gives
    query = torch.randn(int(starts[-1]), heads[0] + 2, HEAD_DIM).to(dtype)[:, : heads[0]]
    plan = plan_paged_attention(starts, seq_lens, table, block_size, dtype)
    ours = paged_attention(query, caches[0], caches[1], plan, SCALE)
    oracle = paged_attention_reference(query, caches[0], caches[1], starts, seq_lens, table, SCALE)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, oracle, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)], ids=["grouped", "all", "one"])
def test_decodes_chunks_and_prompts_in_one_batch(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    compare([(1, 5), (1, 1), (1, 16), (7, 7), (3, 11), (5, 9)], heads=heads, dtype=dtype)


def test_decodes_alone() -> None:
    compare([(1, 1)])
    compare([(1, 4), (1, 5), (1, 8)])


def test_decodes_of_very_different_lengths() -> None:
    """Several groups, whose rows are not in order of length."""
    lens = [(1, 150), (1, 3), (1, 70), (1, 149), (1, 33), (1, 10)]
    compare(lens)
    starts = np.arange(len(lens) + 1)
    table = np.ones((len(lens), 38), dtype=np.int64)
    seq_lens = np.array([total for _, total in lens])
    plan = plan_paged_attention(starts, seq_lens, table, 4, torch.float32)
    assert len(plan.decode_groups) > 1
    padded = sum(group.mask.numel() for group in plan.decode_groups)
    assert padded < 1.3 * seq_lens.sum()


def test_prompts_alone() -> None:
    compare([(9, 9), (4, 4), (2, 2)])


def test_chunks_with_context_alone() -> None:
    compare([(2, 3), (4, 40), (8, 12)], block_size=16)


def test_padding_is_not_read_into_the_result() -> None:
    """What lies beyond a request's tokens, in its last block or the null block, has no weight."""
    cache = torch.randn(3, 4, 1, HEAD_DIM)
    query = torch.randn(2, 1, HEAD_DIM)
    table = np.array([[1, 0], [2, 1]])
    plan = plan_paged_attention(np.array([0, 1, 2]), np.array([2, 5]), table, 4, torch.float32)
    before = paged_attention(query, cache, cache, plan, SCALE)
    cache[0] = 1e4
    cache[1, 2:] = 1e4
    after = paged_attention(query, cache, cache, plan, SCALE)
    assert torch.equal(before[0], after[0])
