"""The noise is the documented function, so that any language can compute it."""

import math

import numpy as np
import pytest

from worker.sampling_noise import exponentials, keys

MASK = 2**64 - 1
MASK_32 = 2**32 - 1
GAMMA = 0x9E3779B97F4A7C15
KEYS = ["a706dd2f4d197e6f", "5e41ab087439611e", "bc16a3d4cc48678e"]
NOISE = [0.0497442260, 0.6053810717]
IDS = [0, 1, 2, 777, 49_151, 200_000]


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def low(z: int) -> int:
    z = (z ^ z >> 16) * 0x7FEB352D & MASK_32
    z = (z ^ z >> 15) * 0x846CA68B & MASK_32
    return z ^ z >> 16


def in_plain_numbers(seed: int, position: int, token_id: int) -> float:
    key = mix(mix((seed & MASK) + GAMMA & MASK) + (position + 1) * GAMMA & MASK)
    bits = low(low(token_id * 0x9E3779B9 & MASK_32 ^ key & MASK_32) + (key >> 32) & MASK_32)
    return -math.log1p(-(bits + 0.5) / 2**32)


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63)])
def test_it_is_what_the_docstring_says(seed: int) -> None:
    for position in (0, 1, 1000, 2**31):
        (key,) = keys(np.array([seed]), np.array([position]))
        got = exponentials(key, np.array(IDS)).tolist()
        assert got == pytest.approx([in_plain_numbers(seed, position, i) for i in IDS], rel=1e-5)


def test_it_never_changes() -> None:
    """A changed value would give running requests another continuation after an upgrade."""
    got = keys(np.array([0, 1, 42]), np.array([0, 0, 7]))
    assert [f"{key:016x}" for key in got.tolist()] == KEYS
    assert exponentials(got[2], np.array([0, 49_151])).tolist() == pytest.approx(NOISE, rel=1e-5)


def test_it_is_exponential_over_tokens_and_over_positions() -> None:
    num = 100_000
    (key,) = keys(np.array([5]), np.array([3]))
    over_tokens = exponentials(key, np.arange(num)).numpy()
    many = keys(np.full(num // 50, 5), np.arange(num // 50))
    over_positions = np.array([float(exponentials(k, np.array([17]))[0]) for k in many])
    for values in (over_tokens, over_positions):
        assert values.min() > 0
        assert np.isfinite(values).all()
        # Kolmogorov-Smirnov: over 1.95 / sqrt(n) has probability 0.001
        ranks = np.arange(1, len(values) + 1) / len(values)
        distance = np.abs(1 - np.exp(-np.sort(values)) - ranks).max()
        assert distance < 1.95 / math.sqrt(len(values))


def test_the_largest_bits_stay_finite() -> None:
    """Float32 rounds the last few hundred of 2**32 values to 1, whose logarithm is not there."""
    values = np.concatenate(
        [exponentials(k, np.arange(2_000_000)).numpy() for k in keys(np.arange(8), np.arange(8))]
    )
    assert np.isfinite(values).all()
    assert values.max() > 14
