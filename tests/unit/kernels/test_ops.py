"""The small kernels against formulas written out."""

import math

import pytest
import torch

from kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference
from kernels.rms_norm import fused_add_rms_norm, rms_norm
from kernels.rotary_embedding import cos_sin_cache, rotary_embedding
from kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    out = rms_norm(x, weight, 1e-2)
    for row, result in zip(x.tolist(), out.tolist(), strict=True):
        rms = math.sqrt(sum(v * v for v in row) / 8 + 1e-2)
        expected = [v / rms * w for v, w in zip(row, weight.tolist(), strict=True)]
        assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm_adds_first_and_in_place(dtype: torch.dtype) -> None:
    x, residual = torch.randn(4, 16).to(dtype), torch.randn(4, 16).to(dtype)
    weight = torch.randn(16).to(dtype)
    total = x + residual
    out, kept = fused_add_rms_norm(x, residual, weight, 1e-5)
    assert kept is residual
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(total, weight, 1e-5))
    assert out.dtype == dtype


def test_rotary_embedding_turns_pairs_of_the_two_halves() -> None:
    inv_freq = torch.tensor([1.0, 0.1])
    cache = cos_sin_cache(inv_freq, 50)
    heads = torch.randn(3, 2, 4)
    positions = torch.tensor([0, 7, 49])
    before = heads.clone()
    rotary_embedding(positions, heads, cache)
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(2):
                angle = position * float(inv_freq[pair])
                low, high = before[token, head, pair], before[token, head, pair + 2]
                turned = complex(low, high) * complex(math.cos(angle), math.sin(angle))
                result = complex(heads[token, head, pair], heads[token, head, pair + 2])
                assert result == pytest.approx(turned, rel=1e-4, abs=1e-5)


def test_rotary_embedding_takes_a_strided_view_and_low_precision() -> None:
    cache = cos_sin_cache(torch.tensor([1.0, 0.1]), 50)
    merged = torch.randn(3, 5, 4).to(torch.bfloat16)
    rest = merged[:, 3:].clone()
    expected = merged[:, :3].float().contiguous()
    positions = torch.tensor([3, 30, 12])
    rotary_embedding(positions, expected, cache)
    rotary_embedding(positions, merged[:, :3], cache)
    assert torch.equal(merged[:, :3], expected.to(torch.bfloat16))
    assert torch.equal(merged[:, 3:], rest)


def test_silu_and_mul_equals_its_reference() -> None:
    x = torch.randn(5, 14)
    kept = x.clone()
    torch.testing.assert_close(silu_and_mul(x), silu_and_mul_reference(x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reshape_and_cache_writes_its_slots_only(dtype: torch.dtype) -> None:
    qkv = torch.randn(3, 6, 8).to(dtype)
    key, value = qkv[:, 2:4], qkv[:, 4:]
    slots = torch.tensor([13, 4, 0])
    caches = [torch.randn(5, 4, 2, 8).to(dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    reshape_and_cache(key, value, caches[0], caches[1], slots)
    reshape_and_cache_reference(key, value, expected[0], expected[1], slots)
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)
    assert torch.equal(caches[0][3, 1], key[0])
