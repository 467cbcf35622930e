"""Generated language-modelling tasks that require attention but no knowledge of English.

The second half of each row can be predicted from the first half by looking back.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase

from oelm.data.sources.readers import Row
from oelm.data.synthetic.rng import Rng

PAIRS = 4
ROUNDS = 4  # how often each pair is repeated in a row
LETTERS = 8  # number of letters that keys are drawn from, and also values
LENGTH = 16  # letters that `copy` repeats


def recall(rng: Rng) -> Row:
    """Return a row of key-value pairs, followed by the same pairs in other orders (induction)."""
    keys = rng.sample(ascii_lowercase[:LETTERS], PAIRS)
    pairs = [f"{key} {rng.pick(ascii_uppercase[:LETTERS])}" for key in keys]
    asked = [pair for _ in range(ROUNDS) for pair in rng.sample(pairs, PAIRS)]
    return {"text": f"{' '.join(pairs)} . {' '.join(asked)}"}


def copy(rng: Rng) -> Row:
    """Return a row of random letters, a full stop, and the same letters again."""
    letters = " ".join(rng.pick(ascii_lowercase) for _ in range(LENGTH))
    return {"text": f"{letters} . {letters}"}


RECALL_TASKS: dict[str, Callable[[Rng], Row]] = {"task-recall": recall, "task-copy": copy}
