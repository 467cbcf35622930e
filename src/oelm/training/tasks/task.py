"""The small protocol between the loop and a task, and the one way to score a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.training.parallel.world import World
from oelm.training.precision import Precision


@dataclass(frozen=True)
class Batch:
    """Rows that go through the network together; every tensor has one entry per row."""

    tensors: dict[str, Tensor]
    weight: int  # what the loss is summed over: target tokens, or rows
    tokens: int  # tokens that are no padding
    numbers: tuple[int, ...] = ()  # the rows' places in their split, where predictions are kept

    @property
    def rows(self) -> int:
        return len(next(iter(self.tensors.values())))

    @property
    def length(self) -> int:
        return self.tensors["ids"].shape[1]

    @property
    def target_length(self) -> int:
        """Tokens of the decoder's side, for encoder-decoder models."""
        labels = self.tensors.get("targets")
        return labels.shape[1] if labels is not None and labels.dim() == 2 else 0

    def take(self, rows: list[int]) -> dict[str, Tensor]:
        """The tensors of some of the rows; all of them without a copy."""
        if len(rows) == self.rows:
            return self.tensors
        index = torch.tensor(rows)
        return {name: tensor[index] for name, tensor in self.tensors.items()}


Metric = Literal["ppl", "accuracy"]
Tensors = dict[str, Tensor]


class Task(Protocol):
    """What the loop needs to know. Batches are pure functions of the step, so every resume is exact."""

    metric: Metric
    steps_per_epoch: int

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        """The rows of an optimizer step (always the same), cut into parts of at most `rows`."""
        ...

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        """The loss summed over what `Batch.weight` counts."""
        ...

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        """The whole split, in batches of at most `rows`."""
        ...

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """(summed loss, predicted classes or None)."""
        ...


class Objective(nn.Module):
    """Network and task as one module from batch to loss: the shape that data-parallel wrappers want."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._loss = task.loss

    def forward(self, tensors: Tensors) -> Tensor:
        return self._loss(self.model, tensors)


@dataclass(frozen=True)
class Evaluation:
    """A split's figures. `n` is what the loss is a mean over: tokens, or rows."""

    loss: float
    n: int
    accuracy: float | None = None
    predicted: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()

    def figures(self) -> dict[str, float | int]:
        """As written to metrics and results."""
        if self.accuracy is not None:
            return {"loss": self.loss, "accuracy": self.accuracy, "n": self.n}
        return {"loss": self.loss, "ppl": math.exp(min(self.loss, 700.0)), "n": self.n}

    def better_than(self, other: Evaluation | None) -> bool:
        """Higher accuracy, the lower loss deciding between equals; without accuracy the lower loss."""
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
    tick: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Score a split with the batches shared over the processes; `tick` is called after each."""
    loss, weight, correct = 0.0, 0, 0
    found: dict[int, tuple[int, int]] = {}  # row -> (label, predicted)
    was_training = model.training
    model.eval()
    try:
        for batch, counts in world.deal(task.eval_batches(split, rows)):
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
                found.update(zip(batch.numbers, pairs, strict=True))
            tick()
    finally:
        model.train(was_training)
    loss, total_weight, total_correct = world.sum([loss, float(weight), float(correct)])
    n = round(total_weight)
    if n == 0:
        raise OelmError(f"the {split} split is too short: there is nothing in it to score")
    if task.metric != "accuracy":
        return Evaluation(loss / n, n)
    own = torch.tensor([(number, *pair) for number, pair in found.items()], dtype=torch.int64).flatten()
    everything = torch.cat([part["rows"] for part in world.gather({"rows": own})]).view(-1, 3).tolist()
    ordered = [pair for _, *pair in sorted(everything)]
    return Evaluation(
        loss / n,
        n,
        accuracy=round(total_correct) / n,
        predicted=tuple(guess for _, guess in ordered),
        labels=tuple(label for label, _ in ordered),
    )
