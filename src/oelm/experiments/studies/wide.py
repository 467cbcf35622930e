"""Study `wide`: the headline arms of the study `gap` at the original study's width, 512 with 6 layers.

The cost of freezing may depend on the width: a head with a frozen projection to 64 dimensions sees less of an
input of width 512 than one with 16 dimensions sees of an input of width 128. At scale `mini` the model keeps
its full size, and only the vocabulary (1,024) and the context length (128) are smaller. A step then takes
about a second on two cores, so the study takes days there. Its runs can be interrupted and resumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oelm.experiments.studies.comparison import arms_of, comparison
from oelm.experiments.studies.gap import EVAL_ROWS, HEADLINE_ARMS
from oelm.experiments.studies.gap import MINI as GAP_MINI
from oelm.experiments.studies.paper import LM_MODEL, language_model

SETS = (("TS", "tinystories"), ("WT2", "wikitext2"))
ROTARY = replace(LM_MODEL, position="rope")

# Overrides at scale `mini`. With 1,500 steps of 1,024 tokens, a run gets past the first, steep part of its
# loss curve.
MINI: dict[str, Any] = {
    **GAP_MINI,
    "model.name": ROTARY.name,
    "budget.steps": 1500,
    "budget.eval_every": 500,
    "optim.warmup_steps": 150,
}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (4e-4, 8e-4, 1.6e-3)}
TRIAL_SHARE = 0.4  # steps of a tuning trial / steps of a run

EXPERIMENTS = [
    e
    for stem, dataset in SETS
    for e in comparison(
        language_model,
        dataset,
        arms_of(HEADLINE_ARMS, ", rotary positions"),
        stem=f"WIDE-{stem}",
        suffix="-rope",
        study="wide",
        group=f"wide/{dataset}",
        model=ROTARY,
        mini={**MINI, "data.eval_rows": EVAL_ROWS[dataset]},
        grids=GRIDS,
        trial_share=TRIAL_SHARE,
    )
]
