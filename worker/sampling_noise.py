"""The noise of sampling: a pure function of (seed, output position, token id).

No generator has a state, so a request that is preempted, replayed elsewhere or batched with others
draws the same numbers. A (seed, position) gives a 64-bit key by SplitMix64's finaliser (Steele, Lea
& Flood 2014), modulo 2**64; each token then mixes it with its id by Wellons's `lowbias32` (2018),
modulo 2**32:

    mix(z):  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
             z = (z ^ z >> 27) * 0x94D049BB133111EB
             z ^ z >> 31
    G    = 0x9E3779B97F4A7C15
    key  = mix(mix(seed + G) + (position + 1) * G)     a negative seed as its two's complement

    low(z):  z = (z ^ z >> 16) * 0x7FEB352D
             z = (z ^ z >> 15) * 0x846CA68B
             z ^ z >> 16
    bits = low(low(id * 0x9E3779B9 ^ (key mod 2**32)) + (key >> 32))
    e    = -log(1 - (bits + 0.5) / 2**32)

`e` is exponentially distributed, in float32; the argument of the logarithm is kept off zero.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HIGH = np.uint64(32)

_ID_MUL = np.uint32(0x9E3779B9)
_LOW_MUL_1 = np.uint32(0x7FEB352D)
_LOW_MUL_2 = np.uint32(0x846CA68B)
_LOW_SHIFTS = (np.uint32(16), np.uint32(15), np.uint32(16))
_LARGEST = 1 - 2.0**-24
"""The largest float32 below 1."""


def keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The key of each (seed, output position); arrays of equal length."""
    # NumPy's integer arrays wrap silently, which is the arithmetic wanted here
    streams = _mix(seeds.astype(np.uint64) + _GAMMA)
    return _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def exponentials(key: np.uint64, token_ids: npt.NDArray[np.int64]) -> Tensor:
    """One exponentially distributed number per token: `[n]` ids give `[n]` float32, over 0."""
    bits = token_ids.astype(np.uint32)
    bits *= _ID_MUL
    bits ^= np.uint32(key & np.uint64(0xFFFFFFFF))
    _low(bits)
    bits += np.uint32(key >> _HIGH)
    _low(bits)
    # float32 is finest near 0, which is where the winners of a race are
    uniform = torch.from_numpy(bits.astype(np.float32))
    uniform.mul_(2.0**-32).add_(2.0**-33).clamp_(max=_LARGEST)
    return uniform.neg_().log1p_().neg_()


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> _SHIFTS[0])) * _MUL_1
    z = (z ^ (z >> _SHIFTS[1])) * _MUL_2
    return z ^ (z >> _SHIFTS[2])


def _low(z: npt.NDArray[np.uint32]) -> None:
    """Mixes in place."""
    z ^= z >> _LOW_SHIFTS[0]
    z *= _LOW_MUL_1
    z ^= z >> _LOW_SHIFTS[1]
    z *= _LOW_MUL_2
    z ^= z >> _LOW_SHIFTS[2]
