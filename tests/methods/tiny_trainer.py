"""A Hugging Face Trainer on a tiny classification task."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import V
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import oelm


def rows(n: int = 48) -> list[dict[str, Tensor]]:
    """The label says whether the first token is in the upper half of the vocabulary."""
    ids = torch.randint(5, V, (n, 6), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": (row[0] > V // 2).long()} for row in ids]


def trainer(
    model: nn.Module | None,
    folder: Any,
    callback: oelm.OELMCallback | None = None,
    steps: int = 6,
    optimizers: Any = (None, None),
    model_init: Any = None,
    **changes: Any,
) -> Trainer:
    fields = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        **changes,
    }
    return Trainer(
        model,
        TrainingArguments(**fields),
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=[callback or oelm.OELMCallback()],
        optimizers=optimizers,
        model_init=model_init,
    )
