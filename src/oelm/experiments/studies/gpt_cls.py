"""Study `gpt-cls`: phase 4's question, "the task type or the architecture?", with tuned arms."""

from __future__ import annotations

from typing import Any

from oelm.experiments.studies.comparison import Arm, comparison
from oelm.experiments.studies.paper import classifier

SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

# arm, method, what it answers
ARMS: tuple[Arm, ...] = (
    ("baseline", "baseline", "the study's baseline, tuned"),
    ("orthogonal-init", "orthogonal-init", "the same start as the method, trained"),
    ("oelm-freeze", "oelm-freeze", "the method"),
    ("oelm-random-matched", "oelm-random-matched", "frozen Gaussian rows of the same scale"),
)

# Sized for two cores: 300 steps of 16, 4,800 samples for every arm of every dataset.
MINI: dict[str, Any] = {
    "budget.accumulation": 1,
    "budget.steps": 300,
    "budget.eval_every": 100,
    "optim.warmup_steps": 50,
    "data.eval_rows": 1000,
}
TRIAL_SHARE = 0.5

EXPERIMENTS = [
    e
    for stem, dataset in SETS
    for e in comparison(
        classifier,
        dataset,
        ARMS,
        stem=f"CLS-{stem}",
        study="gpt-cls",
        group=f"gpt-cls/{dataset}",
        mini=MINI,
        trial_share=TRIAL_SHARE,
    )
]
