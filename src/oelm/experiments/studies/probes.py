"""Study `probes`: generated tasks that only attention can solve, to say why an arm loses.

`recall`: key-value pairs, then keys whose values must be named (induction). `copy`: a random string, a
separator, the string again. Perplexity on them is dominated by the tokens that need the right position.
"""

from __future__ import annotations

from dataclasses import replace

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.gap import LEARNED_ARMS
from oelm.experiments.studies.paper import LM_BUDGET, LM_MODEL, LM_OPTIM
from oelm.methods.registry import method as find_method
from oelm.training.config import DataConfig

TASKS = ("recall", "copy")  # the built-in datasets task-recall and task-copy
TOKENIZER = "bpe-512"  # made of letters and digits: a small vocabulary is the task's own


def _arm(task: str, name: str, position: str) -> Experiment:
    method = find_method(name)
    suffix = "-rope" if position == "rope" else ""
    return Experiment(
        id=f"PROBE-{task}-{name}{suffix}",
        study="probes",
        title=f"{task}: {method.purpose}",
        task="lm",
        data=DataConfig(dataset=f"task-{task}", source="builtin", tokenizer=TOKENIZER, max_length=128),
        model=replace(LM_MODEL, position=position),  # type: ignore[arg-type]
        method=name,
        optim=LM_OPTIM,
        budget=replace(LM_BUDGET, steps=20_000),
        group=f"probes/{task}",
        baseline="" if name == "baseline" and not suffix else f"PROBE-{task}-baseline",
        control=f"PROBE-{task}-{method.control}{suffix}" if method.control else "",
        arm=name + suffix,
        tuned=True,
        mini={"data.tokenizer": TOKENIZER, "data.max_length": 64, "budget.steps": 1000},
    )


EXPERIMENTS = [
    _arm(task, name, position)
    for task in TASKS
    for position, arms in (
        ("learned", LEARNED_ARMS),
        ("rope", ("baseline", "orthogonal-init", "oelm-freeze", "oelm-plus", "trained-plus")),
    )
    for name in arms
]
