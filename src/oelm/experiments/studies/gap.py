"""Study `gap`: what freezing Q/K costs in language modelling, and which trainable extras reduce the cost.

An extra is a trainable part that is added to frozen Q/K, such as a bias or a low-rank adapter. The
control of an arm with extras is the same architecture with trained Q/K, so that a gain of the architecture is
not attributed to freezing. (For a low-rank adapter, the control has no adapter: trained Q/K can represent
everything that an adapter adds.) All arms share one grid of learning rates.
"""

from __future__ import annotations

from typing import Any

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import arms_of, with_rotary_arms
from oelm.experiments.studies.paper import ROTARY_MODEL, language_model

SETS = (("TS", "tinystories"), ("WT2", "wikitext2"), ("OWT", "openwebtext"))

# LEARNED_ARMS have learned position embeddings, as in the original study. ROPE_ARMS have rotary position
# embeddings, which make a stronger model; most extras are tried only there.
LEARNED_ARMS = ("baseline", "orthogonal-init", "oelm-freeze")
BIAS_ARMS = ("baseline-bias", "oelm-bias", "trained-bias")
HEADLINE_ARMS = ("baseline", "oelm-freeze", *BIAS_ARMS, "oelm-plus", "trained-plus")
ROPE_ARMS = (*HEADLINE_ARMS, "orthogonal-init", "oelm-random-matched", "oelm-lowrank")
# To save time, VARIATIONS (further extras, with rotary position embeddings) and BIAS_ARMS with learned
# position embeddings run only on the corpus VARIED.
VARIED = "tinystories"
VARIATIONS = ("oelm-random", "oelm-core", "trained-core", "oelm-conv", "trained-conv")

# Rows of the validation and of the test split at scale `mini`. Each split has 55,000 to 125,000 tokens; with
# more, evaluation would take as long as training.
EVAL_ROWS = {"tinystories": 200, "wikitext2": 15, "openwebtext": 60}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (2e-3, 4e-3, 8e-3)}
TRIAL_SHARE = 0.5  # steps of a tuning trial / steps of a run


def _corpus(stem: str, dataset: str) -> list[Experiment]:
    settings: dict[str, Any] = {
        "stem": f"GAP-{stem}",
        "study": "gap",
        "group": f"gap/{dataset}",
        "grids": GRIDS,
        "trial_share": TRIAL_SHARE,
        "mini": {"data.eval_rows": EVAL_ROWS[dataset]},
    }
    learned, rotary = (BIAS_ARMS, VARIATIONS) if dataset == VARIED else ((), ())
    return with_rotary_arms(
        language_model,
        dataset,
        arms_of((*LEARNED_ARMS, *learned)),
        arms_of((*ROPE_ARMS, *rotary), ", rotary positions"),
        rotary_model=ROTARY_MODEL,
        **settings,
    )


EXPERIMENTS = [e for stem, dataset in SETS for e in _corpus(stem, dataset)]
