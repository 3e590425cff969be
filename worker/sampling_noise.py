"""The noise of sampling: a pure function of (seed, output position).

No generator has a state, so a request that is preempted, replayed elsewhere or batched with others
draws the same numbers. The function is SplitMix64's finaliser (Steele, Lea & Flood 2014) applied
twice, all modulo 2**64:

    mix(z):  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
             z = (z ^ z >> 27) * 0x94D049BB133111EB
             z ^ z >> 31
    G    = 0x9E3779B97F4A7C15
    key  = mix(seed + G)               a negative seed as its two's complement
    bits = mix(key + (position + 1) * G)
    u    = ((bits >> 16) + 0.5) / 2**48

so the positions of a seed walk one SplitMix64 stream. `u` is strictly inside (0, 1), by more than a
double's rounding: inverting a cumulative distribution never runs off its end.
"""

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_DROPPED_BITS = np.uint64(16)


def uniforms(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One uniform number in (0, 1) per (seed, output position); arrays of equal length."""
    # NumPy's integer arrays wrap silently, which is the arithmetic wanted here
    keys = _mix(seeds.astype(np.uint64) + _GAMMA)
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return ((bits >> _DROPPED_BITS).astype(np.float64) + 0.5) * 2.0**-48


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> _SHIFTS[0])) * _MUL_1
    z = (z ^ (z >> _SHIFTS[1])) * _MUL_2
    return z ^ (z >> _SHIFTS[2])
