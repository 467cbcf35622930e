"""Language modelling with the built-in GPT. The documents of a split are one long sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
from torch import Tensor, nn

from oelm.data.batches.language_model import LMBatches, eval_windows
from oelm.data.tokenize.tokens import TokenFile
from oelm.models.gpt import GPT
from oelm.training.tasks.task import Batch, Metric, Tensors

MIN_DOCUMENTS = 10  # with fewer documents in a split, losses are summed per window instead of per document


class LanguageModelling:
    """The task of predicting the next token, scored by perplexity; each token of a split is scored once."""

    metric: Metric = "ppl"

    def __init__(
        self, splits: Mapping[str, TokenFile | np.ndarray], *, context: int, rows_per_step: int, seed: int
    ) -> None:
        self.splits = splits
        self.context = context
        self.batches = LMBatches(splits["train"], context, rows_per_step, seed)
        self.steps_per_epoch = -(-self.batches.windows // rows_per_step)

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        return [_batch(part) for part in self.batches.batch(step).split(rows)]

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        return cast(GPT, model).loss(tensors["ids"], tensors["targets"], reduction="sum")

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        tokens = self.splits[split]
        # Position in the split of the batch's first target. Token 0 is no target, because it has no context.
        first = 1
        for windows in eval_windows(tokens, self.context, rows):
            batch = _batch(windows)
            positions = np.arange(first, first + batch.weight)
            if isinstance(tokens, TokenFile) and tokens.documents >= MIN_DOCUMENTS:
                parts = tokens.documents_of(positions)
            else:
                parts = (positions - 1) // self.context
            yield replace(batch, parts=parts)
            first += batch.weight

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, None]:
        return cast(GPT, model).token_losses(tensors["ids"], tensors["targets"]), None


def _batch(windows: Tensor) -> Batch:
    """Return the batch of (B, T + 1) tokens: the first T are the inputs, the last T the targets."""
    ids, targets = windows[:, :-1], windows[:, 1:]
    return Batch({"ids": ids, "targets": targets}, weight=targets.numel(), tokens=targets.numel())
