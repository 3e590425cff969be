"""The noise is the documented function, so that any language can compute it."""

import numpy as np
import pytest

from worker.sampling_noise import uniforms

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def in_plain_integers(seed: int, position: int) -> float:
    key = mix((seed & MASK) + GAMMA & MASK)
    bits = mix(key + (position + 1) * GAMMA & MASK)
    return ((bits >> 16) + 0.5) / 2**48


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63)])
def test_it_is_what_the_docstring_says(seed: int) -> None:
    positions = np.array([0, 1, 2, 1000, 2**31])
    got = uniforms(np.full(len(positions), seed, dtype=np.int64), positions)
    assert got.tolist() == [in_plain_integers(seed, p) for p in positions.tolist()]


def test_it_never_changes() -> None:
    """A changed value would give running requests another continuation after an upgrade."""
    got = uniforms(np.array([0, 1, 42]), np.array([0, 0, 7]))
    assert got.tolist() == [0.6524484863740323, 0.3681895156516699, 0.7347204584623643]


def test_it_stays_inside_the_open_interval() -> None:
    got = uniforms(np.arange(100_000), np.zeros(100_000, dtype=np.int64))
    assert 0 < got.min() < got.max() < 1
    assert abs(got.mean() - 0.5) < 0.005
