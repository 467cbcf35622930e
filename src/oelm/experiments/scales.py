"""How experiments shrink from full scale to `mini` and `smoke`: less text, a smaller network, fewer steps.

The tables have one entry per kind of experiment (`Experiment.kind`). A run at scale `mini` takes minutes on a
laptop CPU with real text; a run at scale `smoke`, for tests, takes seconds with built-in text. Neither scale
downloads anything.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from oelm.config.overrides import override
from oelm.config.run_config import ModelConfig, RunConfig, Scale
from oelm.models.sizes import SIZES, gpt_shape

SCALES: tuple[Scale, ...] = get_args(Scale)

# Language modelling at scale `mini`. The CPU time of a step is proportional to its tokens, so the batch is
# small: for the same total number of tokens, more steps with fewer tokens each reach a lower loss (measured
# in docs/log.md). A run of 1,200 steps takes about two minutes on one core.
_LM_MINI: dict[str, Any] = {
    "data.tokenizer": "bpe-1024",
    "data.max_length": 128,
    "data.eval_rows": 200,
    "model.name": "mini",
    "model.dropout": 0.0,  # the runs are too short to overfit
    "optim.warmup_steps": 120,
    "optim.beta2": 0.99,
    "budget.batch_size": 4,
    "budget.eval_every": 400,
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
        "denoising": {**_LM_MINI, "optim.beta2": 0.999, "budget.batch_size": 8},
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

# Encoder-decoder family -> small randomly initialised model that replaces it at scale `mini` and `smoke`.
SMALL_MODELS = {"t5": "tiny-t5", "bart": "tiny-bart"}

# Scale -> kind -> steps at that scale / steps at full scale. One factor for all experiments of a kind keeps
# their proportions: an experiment with 200K steps still has twice as many steps as one with 100K.
STEP_SHARE: dict[str, dict[str, float]] = {
    "mini": {"lm": 0.012, "denoising": 0.006, "gpt-cls": 0.06, "finetune": 1.0},
    "smoke": {"lm": 8e-5, "denoising": 8e-5, "gpt-cls": 8e-4, "finetune": 1.0},
}

# Scale -> steps that an experiment keeps at least, if it has so many. Otherwise, a short experiment of the
# user would train for almost no steps.
MIN_STEPS = {"mini": 300, "smoke": 2}

# Kind -> learning rate at the scales `mini` and `smoke` / learning rate at full scale. Small networks that
# train for few steps need larger learning rates.
LR_FACTOR = {"lm": 4.0, "denoising": 4.0, "gpt-cls": 1.0, "finetune": 5.0}

# Scale -> kind -> learning rates that tuning tries. All experiments of a kind share one grid, so that none of
# them is tuned better than another.
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
    """Return the full-scale `config` shrunk to the scale `mini` or `smoke`.

    kind: the kind of experiment (`Experiment.kind`), a key of the tables above
    """
    recipe, factor = dict(RECIPES[scale][kind]), LR_FACTOR[kind]
    share = round(config.budget.steps * STEP_SHARE[scale][kind])
    steps = max(share, min(config.budget.steps, MIN_STEPS[scale]))
    if steps > share and "optim.warmup_steps" in recipe:
        recipe["optim.warmup_steps"] = min(recipe["optim.warmup_steps"], max(2, steps // 10))
    if _is_small(config.model, recipe.get("model.name", "")):  # its learning rate is that of a small network
        del recipe["model.name"]
        factor = 1.0
    small = override(config, recipe)
    for family, name in SMALL_MODELS.items():
        if family in Path(config.model.name).name:  # not in a folder around it, such as /home/bart/bert
            small = override(
                small, {"model.name": name, "model.pretrained": False, "data.tokenizer": "bpe-1024"}
            )
    return replace(
        small,
        budget=replace(small.budget, steps=steps),
        optim=replace(small.optim, lr=config.optim.lr * factor, qk_lr=config.optim.qk_lr * factor),
    )


def _is_small(model: ModelConfig, name: str) -> bool:
    """Return whether `model` is a built-in GPT that is not larger than the GPT `name`."""
    if model.family != "gpt" or name not in SIZES:
        return False
    own, other = gpt_shape(model.name), SIZES[name]
    return all(own[key] <= other[key] for key in ("width", "layers", "ff"))
