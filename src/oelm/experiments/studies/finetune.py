"""Study `finetune`: freeze, orthonormalise or replace the Q/K of a pretrained encoder, then fine-tune it.

The encoder is bert-base-uncased at full scale, and all-MiniLM-L6-v2 (from a pip package) at scale `mini`. All
arms share one grid of learning rates. At scale `mini`, the training sets are small enough for two CPU cores;
that of MNLI is the largest, because MNLI is the hardest task.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.config.run_config import BudgetConfig
from oelm.experiments.studies.comparison import ArmSpec, comparison
from oelm.experiments.studies.paper import fine_tuned
from oelm.methods.presets import find_method

SETS = (("SST2", "sst2"), ("MNLI", "mnli"), ("AGNEWS", "agnews"))

# The random weights of each head are scaled to the norm of the pretrained weights that they replace, because
# the other pretrained layers expect that norm.
RANDOM_AT_NORM = replace(find_method("oelm-random"), name="oelm-random-at-norm", gain="match")

ARMS = (
    ArmSpec("baseline", "baseline", "all parameters trained"),
    ArmSpec("freeze-pretrained", "freeze-pretrained", "pretrained Q/K, frozen"),
    ArmSpec("oelm-pretrained", "oelm-pretrained", "pretrained rows orthonormalised, norms kept, frozen"),
    ArmSpec("oelm-freeze", "oelm-freeze", "random orthonormal rows of norm 1, frozen"),
    ArmSpec("oelm-freeze-matched", "oelm-freeze-matched", "random orthonormal rows, norms kept, frozen"),
    ArmSpec("oelm-random", "oelm-random", "random rows from N(0, 0.02) as in the original study, frozen"),
    ArmSpec("oelm-random-matched", RANDOM_AT_NORM, "random Gaussian rows, norms kept, frozen"),
    ArmSpec("orthogonal-init", "orthogonal-init", "random orthonormal rows of norm 1, trained"),
    ArmSpec(
        "orthogonal-init-matched", "orthogonal-init-matched", "random orthonormal rows, norms kept, trained"
    ),
    ArmSpec("oelm-bias", "oelm-bias", "random orthonormal rows of norm 1, frozen, with trained biases"),
    ArmSpec("trained-bias", "trained-bias", "random orthonormal rows of norm 1 and biases, all trained"),
)
BUDGET = BudgetConfig(batch_size=32, epochs=3, eval_every=0)

# Scale `mini`: dataset -> rows for training, and at most so many for validation and for test.
MINI_ROWS = {"sst2": (1600, 1000), "mnli": (960, 400), "agnews": (320, 400)}
# Epochs of a tuning trial / epochs of a run. A trial has one epoch: of two at scale `mini`, and of three at
# full scale.
TRIAL_SHARE = 0.25


def _mini(dataset: str) -> dict[str, Any]:
    train_rows, eval_rows = MINI_ROWS[dataset]
    return {
        "data.train_rows": train_rows,
        "data.eval_rows": eval_rows,
        "budget.batch_size": 16,
        "budget.epochs": 2,
    }


EXPERIMENTS = [
    e
    for stem, dataset in SETS
    for e in comparison(
        fine_tuned,
        dataset,
        ARMS,
        stem=f"FT-{stem}",
        study="finetune",
        group=f"finetune/{dataset}",
        budget=BUDGET,
        mini=_mini(dataset),
        trial_share=TRIAL_SHARE,
    )
]
