"""Random permutations whose elements are computed one by one, so that the permutation needs no memory.

A resumed run must get the same batches on another machine and with another numpy version. So the permutation
is a Feistel network with the hash function splitmix64, not the random generator of a library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MASK = (1 << 64) - 1
_ROUNDS = 6


def mix(*values: int) -> int:
    """Return a 64-bit hash of a sequence of integers."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = _splitmix((state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return state


def _splitmix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _splitmix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # products of uint64 are modulo 2^64
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffled(positions: ArrayLike, size: int, *key: int) -> NDArray[np.int64]:
    """Return the elements at `positions` of a random permutation of range(size); `key` is the seed.

    >>> sorted(shuffled(range(10), 10, 42).tolist()) == list(range(10))
    True
    >>> int(shuffled([3], 10, 42)[0]) == int(shuffled(range(10), 10, 42)[3])
    True
    """
    values = np.asarray(positions, dtype=np.uint64)
    if size < 2:
        return values.astype(np.int64)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(*key, size, number)) for number in range(_ROUNDS)]
    # The Feistel network permutes 0..4^half-1; results >= size are permuted again until they are below size.
    result = _feistel(values, half, mask, keys)
    outside = np.flatnonzero(result >= np.uint64(size))
    while outside.size:
        result[outside] = _feistel(result[outside], half, mask, keys)
        outside = outside[result[outside] >= np.uint64(size)]
    return result.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], half: np.uint64, mask: np.uint64, keys: list[np.uint64]
) -> NDArray[np.uint64]:
    """Return the values after one Feistel round per key; `half` is the number of bits of each half."""
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_splitmix_array(right ^ key) & mask)
    return (left << half) | right
