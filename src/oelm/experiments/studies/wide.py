"""Study `wide`: the most important arms of the study `gap`, with a model as wide as in the original study.

The cost of freezing may depend on the width, which is only 128 in the study `gap` at scale `mini`. In the
study `wide`, the model has its full width (512) also at scale `mini`; only the vocabulary (1,024) and the
context length (128) are smaller. A training step takes most of a second on two CPU cores, so the study takes
many hours on such a machine. Its runs can be interrupted and resumed.
"""

from __future__ import annotations

from typing import Any

from oelm.experiments.studies.comparison import arms_of, comparison
from oelm.experiments.studies.gap import EVAL_ROWS, HEADLINE_ARMS
from oelm.experiments.studies.paper import ROTARY_MODEL, language_model

SETS = (("TS", "tinystories"), ("WT2", "wikitext2"))

# Settings at scale `mini` that override `scales.RECIPES`: half as many steps as in the study `gap`, because a
# step takes many times as long. They get past the steepest part of the loss curve: on TinyStories, the
# validation loss of `oelm-bias` is 4.4 after 200 steps, 3.8 after 400 and 3.6 after 600 (seed 0).
MINI: dict[str, Any] = {
    "model.name": ROTARY_MODEL.name,
    "budget.steps": 600,
    "budget.eval_every": 200,
    "optim.warmup_steps": 40,
}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (4e-4, 8e-4, 1.6e-3)}
# Steps of a tuning trial / steps of a run. Trials of a quarter chose a learning rate for `trained-bias` that
# is too high for a whole run: its perplexity was 52, that of `oelm-bias` 39 (one seed).
TRIAL_SHARE = 0.5

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
        model=ROTARY_MODEL,
        mini={**MINI, "data.eval_rows": EVAL_ROWS[dataset]},
        grids=GRIDS,
        trial_share=TRIAL_SHARE,
    )
]
