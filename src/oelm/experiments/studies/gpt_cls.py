"""Study `gpt-cls`: GPT classification from scratch with tuned learning rates.

It repeats phase 4 of the original study, which asks whether the cost of freezing Q/K depends on the task or
on the architecture.
"""

from __future__ import annotations

from typing import Any

from oelm.experiments.studies.comparison import arms_of, comparison
from oelm.experiments.studies.paper import classifier

SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

ARMS = arms_of(("baseline", "orthogonal-init", "oelm-freeze", "oelm-random-matched"))

# Overrides at scale `mini`, so that a run suits two CPU cores: 300 steps of 16 rows, or 4,800 examples.
MINI: dict[str, Any] = {
    "budget.accumulation": 1,
    "budget.steps": 300,
    "budget.eval_every": 100,
    "optim.warmup_steps": 50,
    "data.eval_rows": 1000,
}
TRIAL_SHARE = 0.5  # steps of a tuning trial / steps of a run
# Whether a sentence follows from another is not learned from scratch at this scale: all arms, also the
# baseline, had the accuracy of guessing (results/gpt-cls.jsonl.xz).
CHANCE = (
    "a small GPT trained from scratch stays at the accuracy of guessing; `finetune` has a pretrained encoder"
)
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
        mini=MINI,
        left_out_at=LEFT_OUT.get(dataset, {}),
        trial_share=TRIAL_SHARE,
    )
]
