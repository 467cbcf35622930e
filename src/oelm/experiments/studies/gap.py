"""Study `gap`: what freezing Q/K costs in language modelling, and what closes it at what trainable share.

Every arm with small trainable extras has the same architecture with trained Q/K as its control: a gain
that the architecture brings must not be booked on freezing. All arms get the same grid of rates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.paper import LM_BUDGET, LM_MODEL, LM_OPTIM, lm_data
from oelm.methods.registry import method as find_method

SETS = (("TS", "tinystories"), ("WT2", "wikitext2"), ("OWT", "openwebtext"))

LEARNED_ARMS = (
    "baseline",
    "orthogonal-init",
    "oelm-freeze",
    "oelm-random-matched",
    "oelm-random",
    "oelm-conv",
    "trained-conv",
    "oelm-lowrank",
    "trained-lowrank",
    "oelm-plus",
    "trained-plus",
)
ROPE_ARMS = (
    "baseline",
    "orthogonal-init",
    "oelm-freeze",
    "oelm-random-matched",
    "oelm-conv",
    "trained-conv",
    "oelm-lowrank",
    "trained-lowrank",
    "oelm-plus",
    "trained-plus",
)

# Sizes of the mini scale on two cores; on top of the recipe for language models.
MINI: dict[str, Any] = {
    "data.tokenizer": "bpe-1024",
    "budget.batch_size": 8,
    "budget.steps": 500,
    "budget.eval_every": 250,
    "optim.warmup_steps": 50,
}
# Rows of validation and of test that make about 50,000 tokens: more would cost as much as the training.
EVAL_ROWS = {"tinystories": 200, "wikitext2": 15, "openwebtext": 60}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (2e-3, 4e-3, 8e-3)}
TRIAL_SHARE = 0.5  # a trial runs this share of the steps; the same for every arm


def gap_id(stem: str, method: str, position: str) -> str:
    return f"GAP-{stem}-{method}" + ("-rope" if position == "rope" else "")


def _arm(stem: str, dataset: str, name: str, position: str) -> Experiment:
    method = find_method(name)
    if name != "baseline":
        baseline = gap_id(stem, "baseline", position)
    else:  # the rotary baseline is measured against the study's learned positions
        baseline = gap_id(stem, "baseline", "learned") if position == "rope" else ""
    return Experiment(
        id=gap_id(stem, name, position),
        study="gap",
        title=f"{method.purpose}{', rotary positions' if position == 'rope' else ''}",
        task="lm",
        data=lm_data(dataset),
        model=replace(LM_MODEL, position=position),  # type: ignore[arg-type]
        method=name,
        optim=LM_OPTIM,
        budget=LM_BUDGET,
        group=f"gap/{dataset}",
        baseline=baseline,
        control=gap_id(stem, method.control, position) if method.control else "",
        arm=name + ("-rope" if position == "rope" else ""),
        tuned=True,
        grids=GRIDS,
        trial_share=TRIAL_SHARE,
        mini={**MINI, "data.eval_rows": EVAL_ROWS[dataset]},
    )


EXPERIMENTS = [
    _arm(stem, dataset, name, position)
    for stem, dataset in SETS
    for position, arms in (("learned", LEARNED_ARMS), ("rope", ROPE_ARMS))
    for name in arms
]
