"""Study `probes`: generated tasks that only attention can solve. They show what a method cannot learn.

A row of the task `recall` has key-value pairs, then keys whose values must be predicted (induction). A row of
the task `copy` has a random string, a separator, and the same string again. The perplexity depends mostly on
the tokens that a model can predict only by attending to the right earlier position. All arms use rotary
position embeddings, like most arms of the study `gap`; the baseline also runs with learned position
embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.config.run_config import DataConfig
from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import arms_of, with_rotary_arms
from oelm.experiments.studies.paper import LM_BUDGET, ROTARY_MODEL, language_model

TASKS = ("recall", "copy")  # names of the built-in datasets without "task-"
LEARNED_ARMS = ("baseline",)
ROPE_ARMS = (
    *LEARNED_ARMS,
    "orthogonal-init",
    "oelm-freeze",
    "oelm-conv",
    "trained-conv",
    "oelm-lowrank",
    "baseline-bias",
    "oelm-bias",
    "trained-bias",
    "oelm-plus",
    "trained-plus",
)
TOKENIZER = "bpe-512"  # a small vocabulary is enough: the rows consist of letters and digits
# Settings at scale `mini`.
MINI: dict[str, Any] = {
    "data.tokenizer": TOKENIZER,
    "data.eval_rows": 400,
    "budget.batch_size": 8,
    "budget.steps": 400,
    "budget.eval_every": 200,
    "optim.warmup_steps": 40,
    "optim.beta2": 0.999,
}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (2e-3, 4e-3)}
TRIAL_SHARE = 1.0  # trials have as many steps as a run, because a model may learn the task only at the end


def _task(task: str) -> list[Experiment]:
    settings: dict[str, Any] = {
        "stem": f"PROBE-{task}",
        "study": "probes",
        "group": f"probes/{task}",
        "data": DataConfig(dataset=f"task-{task}", source="builtin", tokenizer=TOKENIZER, max_length=128),
        "budget": replace(LM_BUDGET, steps=20_000),
        "mini": MINI,
        "grids": GRIDS,
        "trial_share": TRIAL_SHARE,
    }
    return with_rotary_arms(
        language_model,
        f"task-{task}",
        arms_of(LEARNED_ARMS, f" ({task})"),
        arms_of(ROPE_ARMS, f" ({task}, rotary positions)"),
        rotary_model=ROTARY_MODEL,
        **settings,
    )


EXPERIMENTS = [e for task in TASKS for e in _task(task)]
