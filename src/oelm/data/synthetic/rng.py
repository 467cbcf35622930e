"""A random generator for the built-in text (splitmix64), independent of any library version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from oelm.data.batches.permutation import mix

T = TypeVar("T")


class Rng:
    """A sequence of random choices that depends only on `key`."""

    def __init__(self, *key: int) -> None:
        self._key = mix(*key)
        self._count = 0

    def below(self, limit: int) -> int:
        """Return a random integer in 0..limit-1."""
        self._count += 1
        return mix(self._key, self._count) % limit

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` different options in random order."""
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent
