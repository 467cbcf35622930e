"""Batches for language modelling, as pure functions of (seed, step), so that a run resumes exactly.

The token sequence is cut into windows without regard to document borders, as for GPT-2; EOS marks the end of
a document. Each epoch cuts the sequence at a different offset and shuffles the windows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from oelm.data.batches.permutation import mix, shuffled
from oelm.data.tokenize.tokens import TokenFile
from oelm.errors import UsageError


class LMBatches:
    """Training batches of a token file.

    The sequence is treated as a ring and cut into len(tokens) // context windows, from an offset that is
    different in each epoch. Every window is used once per epoch. A batch may contain windows of two epochs,
    so that no window is dropped. `context` is the context length in tokens.
    """

    def __init__(self, tokens: TokenFile | np.ndarray, context: int, batch_size: int, seed: int) -> None:
        self.ids = tokens.ids if isinstance(tokens, TokenFile) else tokens
        self.context, self.batch_size, self.seed = context, batch_size, seed
        if context < 1 or batch_size < 1:
            raise UsageError(f"context length ({context}) and batch size ({batch_size}) must be at least 1")
        self.windows = len(self.ids) // context  # number of windows per epoch
        if not self.windows:
            raise UsageError(
                f"the split has {len(self.ids):,} tokens, but one window needs {context} tokens: use "
                "more text or a smaller data.max_length"
            )

    def window_starts(self, step: int) -> np.ndarray:
        """Return the position of the first token of each window in the batch of step `step`."""
        first = step * self.batch_size
        positions = np.arange(first, first + self.batch_size)
        epochs = positions // self.windows
        result = np.empty(self.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = shuffled(positions[here] % self.windows, self.windows, self.seed, int(epoch))
            offset = mix(self.seed, int(epoch), 1) % len(self.ids)
            result[here] = (order * self.context + offset) % len(self.ids)
        return result

    def batch(self, step: int) -> torch.Tensor:
        """Return the batch (batch_size, context + 1) of a step: inputs are [:, :-1], targets [:, 1:]."""
        positions = self.window_starts(step)[:, None] + np.arange(self.context + 1)
        return torch.from_numpy(self.ids[positions % len(self.ids)].astype(np.int64))


def eval_windows(tokens: TokenFile | np.ndarray, context: int, batch_size: int) -> Iterator[torch.Tensor]:
    """Yield int64 batches (B, T + 1): inputs are [:, :-1], targets [:, 1:].

    Every token of the split is a target exactly once, except the first token. A target is predicted only from
    the tokens before it in its window. If the last window is shorter, it is a separate batch.
    """
    ids = tokens.ids if isinstance(tokens, TokenFile) else tokens
    targets = max(0, len(ids) - 1)
    full = targets // context
    for first in range(0, full, batch_size):
        starts = np.arange(first, min(first + batch_size, full)) * context
        positions = starts[:, None] + np.arange(context + 1)
        yield torch.from_numpy(ids[positions].astype(np.int64))
    if targets % context:
        yield torch.from_numpy(ids[full * context : targets + 1].astype(np.int64))[None]
