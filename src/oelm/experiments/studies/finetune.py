"""Study `finetune`: a pretrained encoder's Q/K kept, orthonormalised or thrown away, trained or frozen.

At full scale bert-base-uncased, at mini scale all-MiniLM-L6-v2 from pip. Every arm has the same grid of
rates, chosen by validation loss.

The mini scale is sized for two cores, with the most examples for MNLI, which is the hardest to learn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.config.run_config import BudgetConfig
from oelm.experiments.studies.comparison import Arm, comparison
from oelm.experiments.studies.paper import fine_tuned
from oelm.methods.presets import find_method

SETS = (("SST2", "sst2"), ("MNLI", "mnli"), ("AGNEWS", "agnews"))

# In a trained model the scale to match is the one the later layers expect, not that of orthonormal rows.
RANDOM_AT_NORM = replace(find_method("oelm-random"), name="oelm-random-at-norm", gain="match")

# arm, method, what it answers
ARMS: tuple[Arm, ...] = (
    ("baseline", "baseline", "all trained"),
    ("freeze-pretrained", "freeze-pretrained", "Q/K as they are, frozen"),
    (
        "oelm-pretrained",
        "oelm-pretrained",
        "orthonormal rows from the pretrained ones, norms matched, frozen",
    ),
    ("oelm-freeze", "oelm-freeze", "random orthonormal rows of norm 1, frozen"),
    (
        "oelm-freeze-matched",
        "oelm-freeze-matched",
        "random orthonormal rows with the norms that were there, frozen",
    ),
    ("oelm-random", "oelm-random", "the study's N(0, 0.02), frozen"),
    ("oelm-random-matched", RANDOM_AT_NORM, "random Gaussian rows with the norms that were there, frozen"),
    ("orthogonal-init", "orthogonal-init", "random orthonormal rows of norm 1, trained"),
    ("orthogonal-init-matched", "orthogonal-init-matched", "discarding without freezing, norms matched"),
)
BUDGET = BudgetConfig(batch_size=32, epochs=3, eval_every=0)

MINI_ROWS = {"sst2": 640, "mnli": 960, "agnews": 320}  # of training
TRIAL_SHARE = 0.5  # a trial is one epoch of mini's two, two of full's three; the same for every arm


def _mini(dataset: str) -> dict[str, Any]:
    return {
        "data.train_rows": MINI_ROWS[dataset],
        "data.eval_rows": 400,
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
