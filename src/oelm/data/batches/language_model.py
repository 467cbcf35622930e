"""Batches of a language model as pure functions of (seed, step): nothing to save, any resume point is exact.

Packed stream: windows are cut from the line of documents without regard to their borders, as GPT-2 was
trained; EOS tells the model where one document ends. Each epoch cuts at another offset and shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from oelm.data.batches.permutation import mix, shuffled
from oelm.data.tokenize.tokens import TokenFile
from oelm.errors import UsageError


class LMBatches:
    """Training batches over a token file.

    The stream is a ring (its end is the end of a document, so its beginning may follow), cut into
    len(tokens) // context windows from an offset that differs by epoch. Every window is used once per epoch;
    a batch may span two epochs, so that no window is dropped.
    """

    def __init__(self, tokens: TokenFile | np.ndarray, context: int, batch_size: int, seed: int) -> None:
        self.ids = tokens.ids if isinstance(tokens, TokenFile) else tokens
        self.context, self.batch_size, self.seed = context, batch_size, seed
        if context < 1 or batch_size < 1:
            raise UsageError(f"context ({context}) and batch size ({batch_size}) must be at least 1")
        self.windows = len(self.ids) // context  # per epoch
        if not self.windows:
            raise UsageError(
                f"{len(self.ids):,} tokens do not fill one window of {context}: more text, or less context"
            )

    def starts(self, step: int) -> np.ndarray:
        """Where each window of the batch begins in the stream."""
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
        """(batch_size, context + 1) int64: inputs are [:, :-1], targets [:, 1:]."""
        places = self.starts(step)[:, None] + np.arange(self.context + 1)
        return torch.from_numpy(self.ids[places % len(self.ids)].astype(np.int64))


def eval_windows(
    tokens: TokenFile | np.ndarray, context: int, batch_size: int, *, limit: int = 0
) -> Iterator[torch.Tensor]:
    """(b, t + 1) int64 batches in which every token but the very first is a target exactly once.

    Windows do not overlap: each target sees what precedes it within its window. The last one may be shorter
    and comes alone. `limit` stops after so many targets (0 = all), for a quick validation.
    """
    ids = tokens.ids if isinstance(tokens, TokenFile) else tokens
    targets = max(0, len(ids) - 1)
    if limit:
        targets = min(targets, max(limit // context, 1) * context)
    full = targets // context
    for first in range(0, full, batch_size):
        begins = np.arange(first, min(first + batch_size, full)) * context
        places = begins[:, None] + np.arange(context + 1)
        yield torch.from_numpy(ids[places].astype(np.int64))
    if targets % context:
        yield torch.from_numpy(ids[full * context : targets + 1].astype(np.int64))[None]
