"""Study `gpt-cls`: GPT classification from scratch with tuned learning rates.

The study repeats phase 4 of the original study. Phase 4 asks whether the cost of freezing Q/K depends on the
task or on the architecture.
"""

from __future__ import annotations

from typing import Any

from oelm.experiments.studies.comparison import arms_of, comparison
from oelm.experiments.studies.paper import classifier

SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

# The arms with biases show whether trained biases on q and k matter for a classifier, as they do for language
# models with rotary positions.
ARMS = arms_of(
    (
        *("baseline", "orthogonal-init", "oelm-freeze", "oelm-random-matched"),
        *("oelm-bias", "trained-bias"),
    )
)

# Settings at scale `mini`, where a run must be short on two CPU cores: 300 steps of 16 rows, and more where a
# result needs them. On AG News, the baseline reaches 66 % after 300 steps and 82 % after 800.
MINI: dict[str, Any] = {
    "budget.accumulation": 1,
    "budget.steps": 300,
    "budget.eval_every": 100,
    "optim.warmup_steps": 50,
    "data.eval_rows": 1000,
}
LONGER: dict[str, Any] = {
    "budget.steps": 800,
    "budget.eval_every": 200,
    "optim.warmup_steps": 80,
    "data.eval_rows": 3000,
    "model.dropout": 0.0,  # with dropout, torch's fused attention is not used, and a step takes twice as long
}
MINI_OF = {"agnews": {**MINI, **LONGER}}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (1e-4, 3e-4, 1e-3)}
# Steps of a tuning trial / steps of a run. A quarter is too short: 50 of the 75 steps of such a trial are
# warm-up, and on IMDb no learning rate gets better than guessing.
TRIAL_SHARE = 0.5
# Why XNLI and MNLI (does one sentence follow from another?) are left out at scale `mini`: in our runs
# (docs/log.md), no arm, not even the baseline, was better than guessing.
CHANCE = "a small GPT trained from scratch is no better than guessing; use the study `finetune` instead"
LEFT_OUT = {"xnli": {"mini": CHANCE}, "mnli": {"mini": CHANCE}}

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
        mini=MINI_OF.get(dataset, MINI),
        left_out_at=LEFT_OUT.get(dataset, {}),
        grids=GRIDS,
        trial_share=TRIAL_SHARE,
    )
]
