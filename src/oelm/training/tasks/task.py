"""`Task`, the interface between the training loop and a task, and `evaluate`, which scores a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.training.parallel.world import World
from oelm.training.precision import Precision


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together; the first dimension of every tensor is the row."""

    tensors: dict[str, Tensor]
    weight: int  # number of terms in the summed loss: target tokens, or rows for classification
    tokens: int  # number of tokens without padding
    row_numbers: tuple[int, ...] = ()  # positions in the split, for classification

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
        """Return the tensors of the given rows; if these are all rows, the tensors are not copied."""
        if len(rows) == self.rows:
            return self.tensors
        index = torch.tensor(rows)
        return {name: tensor[index] for name, tensor in self.tensors.items()}


Metric = Literal["ppl", "accuracy"]
Tensors = dict[str, Tensor]


class Task(Protocol):
    """The data and the loss of a run. A batch depends only on the step, so that a resume is exact."""

    metric: Metric
    steps_per_epoch: int

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        """Return the rows of an optimizer step in micro-batches of at most `rows` rows."""
        ...

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        """Return the loss, summed over the target tokens (or rows) that `Batch.weight` counts."""
        ...

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        """Yield all rows of a split, in batches of at most `rows` rows."""
        ...

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """Return the summed loss and the predicted classes (None for tasks without classes)."""
        ...


class Objective(nn.Module):
    """A module that maps a batch to its loss, which DDP and torch.compile can wrap."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._loss = task.loss

    def forward(self, tensors: Tensors) -> Tensor:
        return self._loss(self.model, tensors)


@dataclass(frozen=True)
class Evaluation:
    """The scores of a split; `loss` is the mean over `n` target tokens or rows."""

    loss: float
    n: int
    accuracy: float | None = None
    predicted: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()

    def metrics(self) -> dict[str, Any]:
        """Return the values that metrics.jsonl and results.json contain."""
        if self.accuracy is not None:
            return {"loss": self.loss, "accuracy": self.accuracy, "n": self.n}
        return {"loss": self.loss, "ppl": math.exp(min(self.loss, 700.0)), "n": self.n}

    def better_than(self, other: Evaluation | None) -> bool:
        """Return whether the accuracy is higher than that of `other`; a tie is decided by the lower loss."""
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
    """Return the scores of a split, computed in batches of at most `rows` rows, which the ranks divide.

    `after_batch` is called after each batch.
    """
    loss, weight, correct = 0.0, 0, 0
    found: dict[int, tuple[int, int]] = {}  # row -> (label, predicted)
    was_training = model.training
    model.eval()
    try:
        for batch, counts in world.own_batches(task.eval_batches(split, rows)):
            tensors = {name: tensor.to(world.device) for name, tensor in batch.tensors.items()}
            with precision.autocast():
                total, predicted = task.score(model, tensors)
            if not counts:
                continue
            loss += float(total)
            weight += batch.weight
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
            f"the {split} split is too short to be scored; use a dataset with more or longer rows"
        )
    if task.metric != "accuracy":
        return Evaluation(loss / n, n)
    of_all_ranks = {number: pair for part in world.gather(found) for number, pair in part.items()}
    expected, guessed = zip(*(of_all_ranks[number] for number in sorted(of_all_ranks)), strict=True)
    return Evaluation(loss / n, n, round(total_correct) / n, predicted=guessed, labels=expected)
