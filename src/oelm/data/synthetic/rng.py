"""A random generator (splitmix64) for the built-in datasets, which does not depend on library versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from oelm.data.batches.permutation import mix

T = TypeVar("T")


class Rng:
    """A random generator whose choices depend only on `key`, a sequence of integers."""

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
