"""Denoising for encoder-decoders: spans of the text are hidden, the decoder says what was there.

T5 (Raffel et al. 2020): 15 % of the tokens in spans of 3 on average, each span replaced by a sentinel of
its own; the target lists the sentinels with what they stand for. BART (Lewis et al. 2020): text infilling,
30 % in spans of 3 on average, each replaced by one mask; the target is the whole text.
Which spans are hidden depends on (seed, step) alone, in evaluation on the window alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.config.limits import SHORTEST
from oelm.data.batches.language_model import LMBatches, eval_windows
from oelm.data.tokenize.tokens import TokenFile
from oelm.training.tasks.task import Batch, Metric, Tensors

SENTINELS = 100  # as many as T5 has; tokenizers without any get them after their last id
_MEAN_SPAN = 3.0
_EVAL_SEED = 0  # the same hidden spans for every arm and seed


@dataclass(frozen=True)
class Noise:
    """How text is corrupted, and with which ids."""

    style: Literal["t5", "bart"]
    hidden: tuple[int, ...]  # sentinels in order (T5), or the one mask (BART)
    eos_id: int

    @property
    def share(self) -> float:
        return 0.15 if self.style == "t5" else 0.3

    def apply(self, row: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(source, target) of one window of tokens; their lengths depend on the window's length alone."""
        keep, drop = self._spans(len(row), generator)
        source: list[Any] = []
        target: list[Any] = []
        at = 0
        for number, (kept, dropped) in enumerate(zip(keep, drop, strict=True)):
            mark = self.hidden[number if self.style == "t5" else 0]
            source += [row[at : at + kept], [mark]]
            target += [[mark], row[at + kept : at + kept + dropped]]
            at += kept + dropped
        source.append([self.eos_id])
        if self.style == "bart":
            target = [row]
        target.append([self.eos_id])
        return np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)

    def _spans(self, length: int, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        """Lengths of the kept and the hidden stretches, in turn."""
        hidden = min(max(round(length * self.share), 1), length - 1)
        count = min(max(round(hidden / _MEAN_SPAN), 1), length - hidden, SENTINELS)
        return _cut(length - hidden, count, generator), _cut(hidden, count, generator)


def _cut(total: int, parts: int, generator: np.random.Generator) -> list[int]:
    """`total` as the sum of `parts` positive numbers, every way equally likely."""
    borders = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate(([0], borders, [total]))).tolist()


class Denoising:
    """Perplexity per target token of what was hidden."""

    metric: Metric = "ppl"

    def __init__(
        self,
        splits: Mapping[str, TokenFile | np.ndarray],
        noise: Noise,
        *,
        context: int,
        rows_per_step: int,
        seed: int,
    ) -> None:
        self.splits = splits
        self.noise = noise
        self.seed = seed
        # Room for the end token, so that a corrupted row never exceeds max_length.
        self.window = context - 2
        self.batches = LMBatches(splits["train"], self.window, rows_per_step, seed)
        self.steps_per_epoch = -(-self.batches.windows // rows_per_step)

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        windows = self.batches.batch(step)[:, :-1].numpy()
        generator = np.random.default_rng([self.seed, step])
        corrupted = [self.noise.apply(row, generator) for row in windows]
        return [self._batch(corrupted[i : i + rows]) for i in range(0, len(corrupted), rows)]

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        out = model(
            input_ids=tensors["ids"],
            attention_mask=torch.ones_like(tensors["ids"]),  # rows of one step are equally long
            labels=tensors["targets"],
            use_cache=False,
        )
        logits = out.logits.float().flatten(0, 1)  # (B T', V)
        return F.cross_entropy(logits, tensors["targets"].flatten(), reduction="sum")

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        number = 0
        for windows in eval_windows(self.splits[split], self.window, rows):
            plain = windows[:, :-1].numpy()
            if plain.shape[1] < SHORTEST:  # the split's last scrap
                continue
            corrupted = []
            for row in plain:
                corrupted.append(self.noise.apply(row, np.random.default_rng([_EVAL_SEED, number])))
                number += 1
            yield self._batch(corrupted)

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, None]:
        return self.loss(model, tensors), None

    def _batch(self, corrupted: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
        ids, targets = (torch.from_numpy(np.stack(side)) for side in zip(*corrupted, strict=True))
        tensors = {"ids": ids, "targets": targets}
        return Batch(tensors, weight=targets.numel(), tokens=ids.numel() + targets.numel())
