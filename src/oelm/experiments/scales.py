"""How an experiment shrinks: the same shape with less text, a smaller network and fewer steps.

Data only; one table per scale, one row per kind of experiment. `mini` is for real text on a laptop CPU
in minutes, `smoke` for tests in seconds on built-in text. Neither asks a hub for anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from oelm.config.overrides import override
from oelm.config.run_config import RunConfig, Scale

SCALES: tuple[Scale, ...] = get_args(Scale)

_LM_MINI: dict[str, Any] = {
    "data.tokenizer": "bpe-2048",
    "data.max_length": 128,
    "data.eval_rows": 400,
    "model.name": "mini",
    "model.dropout": 0.0,  # a fraction of an epoch to a few: nothing to regularise yet
    "optim.warmup_steps": 100,
    "budget.batch_size": 16,
    "budget.eval_every": 200,
    "budget.log_every": 20,
}
_LM_SMOKE: dict[str, Any] = {
    "data.source": "builtin",
    "data.tokenizer": "bpe-512",
    "data.max_length": 32,
    "data.train_rows": 200,
    "data.eval_rows": 20,
    "model.name": "smoke",
    "optim.warmup_steps": 2,
    "budget.batch_size": 4,
    "budget.eval_every": 4,
    "budget.log_every": 2,
}
_CLS_SMOKE: dict[str, Any] = {
    "data.source": "builtin",
    "data.tokenizer": "bpe-512",
    "data.max_length": 32,
    "data.train_rows": 64,
    "data.eval_rows": 32,
    "budget.batch_size": 8,
    "budget.log_every": 2,
}

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "mini": {
        "lm": _LM_MINI,
        "denoising": {**_LM_MINI, "budget.batch_size": 8},
        "gpt-cls": {
            "data.tokenizer": "bpe-2048",
            "data.max_length": 128,
            "data.train_rows": 6000,
            "data.eval_rows": 2000,
            "model.name": "mini",
            "optim.warmup_steps": 100,
            "budget.eval_every": 100,
            "budget.log_every": 20,
        },
        "finetune": {
            "data.tokenizer": "model",
            "data.max_length": 64,
            "data.train_rows": 3200,
            "data.eval_rows": 1500,
            "model.name": "minilm",
            "budget.log_every": 10,
        },
    },
    "smoke": {
        "lm": _LM_SMOKE,
        "denoising": {**_LM_SMOKE, "model.pretrained": False},
        "gpt-cls": {
            **_CLS_SMOKE,
            "model.name": "smoke",
            "optim.warmup_steps": 2,
            "budget.accumulation": 2,
            "budget.eval_every": 4,
        },
        "finetune": {**_CLS_SMOKE, "model.name": "tiny-bert", "model.pretrained": False, "budget.epochs": 1},
    },
}

# A transformers model that is not an encoder has its own small stand-in; no hub has to be asked.
SMALL_MODELS = {"t5": "tiny-t5", "bart": "tiny-bart"}

# Fewer steps in the same proportions: the study's 200K stays twice its 100K.
STEP_SHARE: dict[str, dict[str, float]] = {
    "mini": {"lm": 0.012, "denoising": 0.006, "gpt-cls": 0.06, "finetune": 1.0},
    "smoke": {"lm": 8e-5, "denoising": 8e-5, "gpt-cls": 8e-4, "finetune": 1.0},
}

# A narrow network over few steps needs larger rates; the ratio between arms stays the study's.
RATE_FACTOR: dict[str, dict[str, float]] = {
    "mini": {"lm": 4.0, "denoising": 4.0, "gpt-cls": 1.0, "finetune": 5.0},
    "smoke": {"lm": 4.0, "denoising": 4.0, "gpt-cls": 1.0, "finetune": 5.0},
}

# The same grid for every arm of a kind: a rate is only better when the others had the same chance.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "full": {
        "lm": (1e-4, 3e-4, 1e-3, 3e-3),
        "denoising": (1e-4, 3e-4, 1e-3),
        "gpt-cls": (1e-4, 3e-4, 1e-3),
        "finetune": (1e-5, 2e-5, 5e-5, 1e-4),
    },
    "mini": {
        "lm": (1e-3, 2e-3, 4e-3, 8e-3),
        "denoising": (1e-3, 3e-3),
        "gpt-cls": (3e-4, 1e-3, 3e-3),
        "finetune": (5e-5, 1e-4, 2e-4),
    },
    "smoke": {
        "lm": (1e-3, 4e-3),
        "denoising": (1e-3, 4e-3),
        "gpt-cls": (3e-4, 1e-3),
        "finetune": (1e-4, 1e-3),
    },
}


def shrink(config: RunConfig, scale: str, kind: str) -> RunConfig:
    """`config` (full scale) at `scale`, by the recipe of its kind."""
    recipe = RECIPES[scale][kind]
    small = override(config, recipe)
    for family, name in SMALL_MODELS.items():
        if family in config.model.name:
            small = override(
                small, {"model.name": name, "model.pretrained": False, "data.tokenizer": "bpe-1024"}
            )
    steps = round(config.budget.steps * STEP_SHARE[scale][kind])
    rate = RATE_FACTOR[scale][kind]
    return replace(
        small,
        budget=replace(small.budget, steps=steps),
        optim=replace(small.optim, lr=config.optim.lr * rate, qk_lr=config.optim.qk_lr * rate),
    )
