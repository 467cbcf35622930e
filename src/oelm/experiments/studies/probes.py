"""Study `probes`: generated tasks that only attention can solve, to say why an arm loses.

`recall`: key-value pairs, then keys whose values must be named (induction). `copy`: a random string, a
separator, the string again. Perplexity on them is dominated by the tokens that need the right position.
All arms have rotary positions, as where `gap` asks what closes it; the baseline learned ones, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.config.run_config import DataConfig
from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import comparison
from oelm.experiments.studies.gap import arms_of
from oelm.experiments.studies.paper import LM_BUDGET, LM_MODEL, language_model

TASKS = ("recall", "copy")  # the built-in datasets task-recall and task-copy
LEARNED_ARMS = ("baseline",)
ROPE_ARMS = (
    *LEARNED_ARMS,
    "orthogonal-init",
    "oelm-freeze",
    "oelm-conv",
    "trained-conv",
    "oelm-lowrank",
    "oelm-plus",
    "trained-plus",
)
TOKENIZER = "bpe-512"  # made of letters and digits: a small vocabulary is the task's own
# Whole rows must fit into a window, or the answer is not in it. Trials are whole runs: whether a task is
# learned at all shows only towards the end.
MINI: dict[str, Any] = {
    "data.tokenizer": TOKENIZER,
    "budget.batch_size": 8,
    "budget.steps": 400,
    "optim.warmup_steps": 40,
}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (2e-3, 4e-3)}


def _task(task: str) -> list[Experiment]:
    settings: dict[str, Any] = {
        "stem": f"PROBE-{task}",
        "study": "probes",
        "group": f"probes/{task}",
        "data": DataConfig(dataset=f"task-{task}", source="builtin", tokenizer=TOKENIZER, max_length=128),
        "budget": replace(LM_BUDGET, steps=20_000),
        "mini": MINI,
        "grids": GRIDS,
    }
    learned = comparison(language_model, f"task-{task}", arms_of(LEARNED_ARMS, f" ({task})"), **settings)
    rope = comparison(
        language_model,
        f"task-{task}",
        arms_of(ROPE_ARMS, f" ({task}, rotary positions)"),
        suffix="-rope",
        baseline_of_first=learned[0].id,
        model=replace(LM_MODEL, position="rope"),
        **settings,
    )
    return [*learned, *rope]


EXPERIMENTS = [e for task in TASKS for e in _task(task)]
