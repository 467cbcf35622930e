"""`Task`, the interface between the training loop and a task, and `evaluate()`, which scores a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.training.parallel.world import World
from oelm.training.precision import Precision


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together; the first dimension of every tensor is the row."""

    tensors: dict[str, Tensor]
    weight: int  # number of losses in the batch: one per target token or, in classification, one per row
    tokens: int  # number of tokens without padding
    row_numbers: tuple[int, ...] = ()  # positions of the rows in the split (classification only)
    # Evaluation of language models only: the number of the document (or window) of each target token.
    parts: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def length(self) -> int:
        return self.tensors["ids"].shape[1]

    @property
    def target_length(self) -> int:
        """The length of the target sequences; 0 for classification."""
        labels = self.tensors.get("targets")
        return labels.shape[1] if labels is not None and labels.dim() == 2 else 0

    def take(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the tensors of the rows at the positions `rows`; copies only if some rows are left out."""
        if len(rows) == self.rows:
            return self.tensors
        index = torch.tensor(rows)
        return {name: tensor[index] for name, tensor in self.tensors.items()}


Metric = Literal["ppl", "accuracy"]
Tensors = dict[str, Tensor]
Parts = dict[int, tuple[int, float]]  # number of a document (or window) -> (target tokens, summed loss)


class Task(Protocol):
    """The data and the loss of a run. The batches depend only on the step, so that a run resumes exactly."""

    metric: Metric
    steps_per_epoch: int

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        """Return the rows of an optimizer step in micro-batches of at most `rows` rows."""
        ...

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        """Return the summed loss of a batch: over its target tokens or, in classification, over its rows."""
        ...

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        """Yield all rows of a split, in batches of at most `rows` rows."""
        ...

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """Return the loss of each target token or row, and the predicted classes (classification) or None."""
        ...


class Objective(nn.Module):
    """A module whose `forward()` returns the loss of a batch, so that DDP and torch.compile can wrap it."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._loss = task.loss

    def forward(self, tensors: Tensors) -> Tensor:
        return self._loss(self.model, tensors)


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a split; `loss` is the mean over `n` target tokens or rows."""

    loss: float
    n: int
    accuracy: float | None = None
    predicted: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    part_tokens: tuple[int, ...] = ()  # language models: number of target tokens per document (or window)
    part_losses: tuple[float, ...] = ()  # language models: summed loss per document (or window)

    def metrics(self) -> dict[str, Any]:
        """Return the values that metrics.jsonl and results.json contain."""
        if self.accuracy is not None:
            return {"loss": self.loss, "accuracy": self.accuracy, "n": self.n}
        return {"loss": self.loss, "ppl": math.exp(min(self.loss, 700.0)), "n": self.n}

    def better_than(self, other: Evaluation | None) -> bool:
        """Return whether the accuracy is higher than in `other` or, if equal or None, the loss is lower."""
        if other is None:
            return True
        mine, theirs = (e.accuracy if e.accuracy is not None else 0.0 for e in (self, other))
        return mine > theirs or (mine == theirs and self.loss < other.loss)


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    split: str,
    *,
    rows: int,
    world: World,
    precision: Precision,
    after_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Return the scores of `model` on a split, computed in batches of at most `rows` rows.

    Each rank scores a part of the batches. `after_batch` is called after each batch.
    """
    loss, weight, correct = 0.0, 0, 0
    found: dict[int, tuple[int, int]] = {}  # row number -> (label, predicted class)
    parts: Parts = {}
    was_training = model.training
    model.eval()
    try:
        for batch, counts in world.own_batches(task.eval_batches(split, rows)):
            tensors = {name: tensor.to(world.device) for name, tensor in batch.tensors.items()}
            with precision.autocast():
                scored, predicted = task.score(model, tensors)
            if not counts:
                continue
            losses = scored.float().cpu().numpy().astype(np.float64)
            loss += float(losses.sum())
            weight += batch.weight
            if batch.parts is not None:
                _add_parts(parts, batch.parts, losses)
            if predicted is not None:
                labels = batch.tensors["labels"].tolist()
                pairs = list(zip(labels, predicted.tolist(), strict=True))
                correct += sum(label == guess for label, guess in pairs)
                found.update(zip(batch.row_numbers, pairs, strict=True))
            after_batch()
    finally:
        model.train(was_training)
    loss, total_weight, total_correct = world.sum([loss, float(weight), float(correct)])
    n = round(total_weight)
    if n == 0:
        raise OelmError(
            f"the {split} split is too short to be scored: use a dataset with more or longer rows"
        )
    if task.metric != "accuracy":
        tokens, sums = _merge_parts(world.gather(parts))
        return Evaluation(loss / n, n, part_tokens=tokens, part_losses=sums)
    of_all_ranks = {number: pair for part in world.gather(found) for number, pair in part.items()}
    expected, guessed = zip(*(of_all_ranks[number] for number in sorted(of_all_ranks)), strict=True)
    return Evaluation(loss / n, n, round(total_correct) / n, predicted=guessed, labels=expected)


def _add_parts(parts: Parts, numbers: np.ndarray, losses: np.ndarray) -> None:
    """Add the losses of one batch to `parts`; `numbers` is the document (or window) of each loss."""
    first = int(numbers.min())
    counts = np.bincount(numbers.ravel() - first)
    sums = np.bincount(numbers.ravel() - first, losses.ravel())
    for i in np.flatnonzero(counts).tolist():
        tokens, total = parts.get(first + i, (0, 0.0))
        parts[first + i] = tokens + int(counts[i]), total + float(sums[i])


def _merge_parts(of_all_ranks: list[Parts]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the token counts and the summed losses of all documents, in order, added up over the ranks.

    Several ranks may have scored parts of the same document.
    """
    numbers = sorted({number for parts in of_all_ranks for number in parts})
    held = [[parts[number] for parts in of_all_ranks if number in parts] for number in numbers]
    return tuple(sum(t for t, _ in each) for each in held), tuple(sum(s for _, s in each) for each in held)
