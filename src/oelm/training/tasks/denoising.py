"""Denoising for encoder-decoders: spans of the text are masked, and the decoder predicts them.

T5 (Raffel et al. 2020) masks 15 % of the tokens, in spans of 3 on average. Each span is replaced by its own
sentinel token, and the target lists each sentinel with the tokens of its span. BART (Lewis et al. 2020, text
infilling) masks 30 % of the tokens, in spans of 3 on average. Each span is replaced by one mask token, and
the target is the full text. In training, the choice of spans depends only on the seed and the step; in
evaluation, it depends only on the position of the window of tokens in the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.config.limits import MIN_DENOISING_WINDOW
from oelm.data.batches.language_model import LMBatches, eval_windows
from oelm.data.tokenize.tokens import TokenFile
from oelm.training.tasks.task import Batch, Metric, Tensors

SENTINELS = 100  # number of sentinel tokens, as in T5
_MEAN_SPAN = 3.0  # mean length of a masked span in tokens
_EVAL_SEED = 0  # one seed for all runs, so that the scores of different arms and seeds are comparable


@dataclass(frozen=True)
class Noise:
    """How text is corrupted, and which token ids replace the masked spans."""

    style: Literal["t5", "bart"]
    mask_ids: tuple[int, ...]  # the sentinels in order (T5), or the mask token (BART)
    eos_id: int

    @property
    def masked_share(self) -> float:
        return 0.15 if self.style == "t5" else 0.3

    def apply(self, row: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return (encoder input, decoder target) of `row`; both lengths depend only on `len(row)`."""
        keep, drop = self._spans(len(row), generator)
        source: list[Any] = []
        target: list[Any] = []
        at = 0
        for number, (kept, dropped) in enumerate(zip(keep, drop, strict=True)):
            mark = self.mask_ids[number if self.style == "t5" else 0]
            source += [row[at : at + kept], [mark]]
            target += [[mark], row[at + kept : at + kept + dropped]]
            at += kept + dropped
        source.append([self.eos_id])
        if self.style == "bart":
            target = [row]
        target.append([self.eos_id])
        return np.concatenate(source).astype(np.int64), np.concatenate(target).astype(np.int64)

    def _spans(self, length: int, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        """Return the lengths of the kept spans and of the masked spans, which alternate; kept comes first."""
        masked = min(max(round(length * self.masked_share), 1), length - 1)
        count = min(max(round(masked / _MEAN_SPAN), 1), length - masked, SENTINELS)
        return _cut(length - masked, count, generator), _cut(masked, count, generator)


def _cut(total: int, parts: int, generator: np.random.Generator) -> list[int]:
    """Return `parts` random positive integers with the sum `total`; every such list is equally likely."""
    borders = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate(([0], borders, [total]))).tolist()


class Denoising:
    """The denoising task: prediction of masked spans, scored by perplexity per target token."""

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
        # A window is two tokens shorter than max_length, to leave room for a mask token and an end token.
        self.window = context - 2
        self.batches = LMBatches(splits["train"], self.window, rows_per_step, seed)
        self.steps_per_epoch = -(-self.batches.windows // rows_per_step)

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        windows = self.batches.batch(step)[:, :-1].numpy()
        generator = np.random.default_rng([self.seed, step])
        corrupted = [self.noise.apply(row, generator) for row in windows]
        return [self._batch(corrupted[i : i + rows]) for i in range(0, len(corrupted), rows)]

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        return self._losses(model, tensors, reduction="sum")

    def _losses(self, model: nn.Module, tensors: Tensors, *, reduction: str) -> Tensor:
        out = model(
            input_ids=tensors["ids"],
            attention_mask=torch.ones_like(tensors["ids"]),  # no padding: all rows have the same length
            labels=tensors["targets"],
            use_cache=False,
        )
        logits = out.logits.float().flatten(0, 1)  # (B T', V)
        return F.cross_entropy(logits, tensors["targets"].flatten(), reduction=reduction)

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        number = 0
        for windows in eval_windows(self.splits[split], self.window, rows):
            plain = windows[:, :-1].numpy()
            if plain.shape[1] < MIN_DENOISING_WINDOW:  # the last window of the split is too short to mask
                continue
            numbers = np.arange(number, number + len(plain))
            number += len(plain)
            corrupted = [
                self.noise.apply(row, np.random.default_rng([_EVAL_SEED, i]))
                for i, row in zip(numbers.tolist(), plain, strict=True)
            ]
            batch = self._batch(corrupted)
            yield replace(batch, parts=numbers.repeat(batch.target_length))

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, None]:
        return self._losses(model, tensors, reduction="none"), None

    def _batch(self, corrupted: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
        ids, targets = (torch.from_numpy(np.stack(side)) for side in zip(*corrupted, strict=True))
        tensors = {"ids": ids, "targets": targets}
        return Batch(tensors, weight=targets.numel(), tokens=ids.numel() + targets.numel())
