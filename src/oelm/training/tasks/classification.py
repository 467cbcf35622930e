"""Classification of texts and of pairs of texts, with the built-in GPT or a transformers model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.data.batches.classification import BatchPlan, EncodedSplit, eval_batches
from oelm.models.gpt import GPT
from oelm.training.tasks.task import Batch, Metric, Tensors


class Classification:
    """The classification task, scored by accuracy.

    A batch contains rows of similar length. They are padded to the longest row of the batch, or to `pad_to`
    tokens if `pad_to` is not 0.
    """

    metric: Metric = "accuracy"

    def __init__(
        self,
        splits: Mapping[str, EncodedSplit],
        *,
        rows_per_step: int,
        seed: int,
        segments: bool = False,
        pad_to: int = 0,
    ) -> None:
        self.splits = splits
        self.segments = segments
        self.pad_to = pad_to
        self.plan = BatchPlan(splits["train"].lengths, rows_per_step, seed)
        self.steps_per_epoch = self.plan.batches_per_epoch

    def micro_batches(self, step: int, rows: int) -> list[Batch]:
        chosen = self.plan.batch(step)
        parts = [chosen[i : i + rows] for i in range(0, len(chosen), rows)]
        return [self._batch("train", part) for part in parts]

    def loss(self, model: nn.Module, tensors: Tensors) -> Tensor:
        return F.cross_entropy(class_logits(model, tensors).float(), tensors["labels"], reduction="sum")

    def eval_batches(self, split: str, rows: int) -> Iterator[Batch]:
        for chosen in eval_batches(self.splits[split].lengths, rows):
            yield self._batch(split, chosen)

    def score(self, model: nn.Module, tensors: Tensors) -> tuple[Tensor, Tensor]:
        logits = class_logits(model, tensors).float()
        return F.cross_entropy(logits, tensors["labels"], reduction="none"), logits.argmax(-1)

    def _batch(self, split: str, chosen: np.ndarray) -> Batch:
        encoded = self.splits[split]
        ids, lengths, labels = encoded.collate(chosen, pad_to=self.pad_to)
        tensors = {"ids": ids, "lengths": lengths, "labels": labels}
        if self.segments:
            tensors["segments"] = encoded.token_types(chosen, ids.shape[1])
        return Batch(
            tensors, weight=len(chosen), tokens=int(lengths.sum()), row_numbers=tuple(chosen.tolist())
        )


def class_logits(model: nn.Module, tensors: Tensors) -> Tensor:
    """Return the logits (B, classes) of the built-in GPT or of a transformers model."""
    ids, lengths = tensors["ids"], tensors["lengths"]
    if isinstance(model, GPT):
        return model.classify(ids, lengths)
    mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()  # (B, T)
    extra = {"token_type_ids": tensors["segments"]} if "segments" in tensors else {}
    return model(input_ids=ids, attention_mask=mask, **extra).logits
