"""Generated tasks that only attention can solve, as text for a language model.

In the second half of each row the right answer stands somewhere in the first half: what a model loses there
it loses in looking back, not in knowing English.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase

from oelm.data.sources.readers import Row
from oelm.data.synthetic.stories import Dice

PAIRS = 4
ROUNDS = 4  # each key is asked for this often: more to learn from in a row
LETTERS = 8  # of the alphabet, for keys and for values
LENGTH = 16


def recall(dice: Dice) -> Row:
    """Keys with values, then the keys in other orders, each to be followed by its value again (induction)."""
    keys = dice.some(ascii_lowercase[:LETTERS], PAIRS)
    pairs = [f"{key} {dice.pick(ascii_uppercase[:LETTERS])}" for key in keys]
    asked = [pair for _ in range(ROUNDS) for pair in dice.some(pairs, PAIRS)]
    return {"text": f"{' '.join(pairs)} . {' '.join(asked)}"}


def copy(dice: Dice) -> Row:
    """Random letters, a full stop, the same letters again."""
    letters = " ".join(dice.pick(ascii_lowercase) for _ in range(LENGTH))
    return {"text": f"{letters} . {letters}"}


RECALL_TASKS: dict[str, Callable[[Dice], Row]] = {"task-recall": recall, "task-copy": copy}
