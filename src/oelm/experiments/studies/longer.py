"""Study `longer`: does the difference between frozen and trained Q/K grow or shrink with longer training?

Two arms of the study `gap`, `oelm-plus` and its control, train on one corpus for four and for sixteen times
as many steps. The corpus is the one of `gap` with the most text: at scale `mini`, the longest runs read it
three to four times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import arms_of, comparison
from oelm.experiments.studies.gap import EVAL_ROWS, GRIDS
from oelm.experiments.studies.paper import LM_BUDGET, ROTARY_MODEL, language_model

DATASET = "wikitext2"
ARMS = ("trained-plus", "oelm-plus")
FACTORS = (4, 16)  # steps of a run / steps of a run of the study `gap`


def _longer(factor: int) -> list[Experiment]:
    mini: dict[str, Any] = {"data.eval_rows": EVAL_ROWS[DATASET], "budget.eval_every": 400 * factor}
    return comparison(
        language_model,
        DATASET,
        arms_of(ARMS, f", rotary positions, {factor} times the steps"),
        stem=f"LONG{factor}-WT2",
        suffix="-rope",
        study="longer",
        group=f"longer/{factor}x",
        model=ROTARY_MODEL,
        budget=replace(LM_BUDGET, steps=LM_BUDGET.steps * factor),
        mini=mini,
        grids=GRIDS,
        trial_share=0.5 / factor,  # trials as long as those of the study `gap`
    )


EXPERIMENTS = [e for factor in FACTORS for e in _longer(factor)]
