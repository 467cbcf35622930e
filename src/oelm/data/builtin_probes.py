"""Generated tasks that only attention can solve, as text for a language model.

In the second half of each row the right answer stands somewhere in the first half: what a model loses there
it loses in looking back, not in knowing English.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase

from oelm.data.builtin import Dice
from oelm.data.readers import Row

PAIRS = 8
LENGTH = 16


def recall(dice: Dice) -> Row:
    """Keys with values, then the same keys in another order, each to be followed by its value (induction)."""
    keys = dice.some(ascii_lowercase, PAIRS)
    pairs = [f"{key} {dice.pick(ascii_uppercase)}" for key in keys]
    asked = dice.some(pairs, PAIRS)
    return {"text": f"{' '.join(pairs)} . {' '.join(asked)}"}


def copy(dice: Dice) -> Row:
    """Random letters, a full stop, the same letters again."""
    letters = " ".join(dice.pick(ascii_lowercase) for _ in range(LENGTH))
    return {"text": f"{letters} . {letters}"}


PROBES: dict[str, Callable[[Dice], Row]] = {"task-recall": recall, "task-copy": copy}
