"""Study `gpt-cls`: GPT classification from scratch with tuned learning rates.

It repeats phase 4 of the original study: does the cost of freezing depend on the task or on the architecture?
"""

from __future__ import annotations

from typing import Any

from oelm.experiments.studies.comparison import arms_of, comparison
from oelm.experiments.studies.paper import classifier

SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

ARMS = arms_of(("baseline", "orthogonal-init", "oelm-freeze", "oelm-random-matched"))

# Sized for two cores: 300 steps of 16 rows, so 4,800 examples per run.
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
