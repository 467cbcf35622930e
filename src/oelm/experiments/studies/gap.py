"""Study `gap`: what freezing Q/K costs in language modelling, and what closes it at what trainable share.

Every arm with small trainable extras has the same architecture with trained Q/K as its control (that of a
residue is the plain one): a gain that the architecture brings must not be booked on freezing. All arms
get the same grid of rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import Arm, comparison
from oelm.experiments.studies.paper import LM_MODEL, language_model
from oelm.methods.method import Method
from oelm.methods.presets import find_method

SETS = (("TS", "tinystories"), ("WT2", "wikitext2"), ("OWT", "openwebtext"))

# What closes the gap is asked of the stronger architecture, that with rotary positions; learned ones are
# the original study's. All of it takes about three and a half hours of two idle cores at mini scale
# (--seeds 1 2 3 --trial-seeds 0 --slots 2 --threads 1).
LEARNED_ARMS = ("baseline", "orthogonal-init", "oelm-freeze")
ROPE_ARMS = (
    *LEARNED_ARMS,
    "oelm-random-matched",
    "oelm-random",
    "oelm-conv",
    "trained-conv",
    "oelm-lowrank",
    "oelm-plus",
    "trained-plus",
)
# The smaller parts, and variations of the flagship: asked of one corpus.
VARIED = "tinystories"
VARIATIONS: tuple[str | Method, ...] = (
    "oelm-core",
    "trained-core",
    "oelm-temperature",
    "trained-temperature",
    "oelm-relative",
    "trained-relative",
    replace(
        find_method("oelm-conv"),
        name="oelm-conv-lowrank",
        lowrank=4,
        lowrank_scale=4.0,
        purpose="frozen orthogonal Q/K with the convolution on q and k and a residue of rank 4",
        reference=f"{find_method('oelm-conv').reference}; {find_method('oelm-lowrank').reference}",
    ),
    replace(
        find_method("oelm-plus"),
        name="oelm-plus-wide",
        lowrank=16,
        purpose="oelm-plus with a residue of rank 16: what a larger trained share brings",
        controls="whether the rank of the residue is what oelm-plus lacks",
    ),
    replace(
        find_method("oelm-plus"),
        name="oelm-plus-temperature",
        temperature=True,
        purpose="oelm-plus with one trainable temperature per head",
        controls="whether the sharpness of attention is what oelm-plus lacks",
        control="trained-plus-temperature",
    ),
    replace(
        find_method("trained-plus"),
        name="trained-plus-temperature",
        temperature=True,
        purpose="orthogonal start, trained, in the architecture of oelm-plus-temperature",
        controls="the architecture of oelm-plus-temperature: what remains is the freezing",
    ),
)

# Sizes of the mini scale on two cores; on top of the recipe for language models.
MINI: dict[str, Any] = {
    "data.tokenizer": "bpe-1024",
    "budget.batch_size": 8,
    "budget.steps": 600,
    "budget.eval_every": 300,
    "optim.warmup_steps": 60,
}
# Rows of validation and of test that make 55,000 to 125,000 tokens: more would cost as much as the training.
EVAL_ROWS = {"tinystories": 200, "wikitext2": 15, "openwebtext": 60}
GRIDS: dict[str, tuple[float, ...]] = {"mini": (1.5e-3, 3e-3, 6e-3)}
TRIAL_SHARE = 0.5  # a trial runs this share of the steps; the same for every arm


def arms_of(methods: Sequence[str | Method], note: str = "") -> list[Arm]:
    return [(find_method(m).name, m, find_method(m).purpose + note) for m in methods]


def _corpus(stem: str, dataset: str) -> list[Experiment]:
    settings: dict[str, Any] = {
        "stem": f"GAP-{stem}",
        "study": "gap",
        "group": f"gap/{dataset}",
        "grids": GRIDS,
        "trial_share": TRIAL_SHARE,
        "mini": {**MINI, "data.eval_rows": EVAL_ROWS[dataset]},
    }
    learned = comparison(language_model, dataset, arms_of(LEARNED_ARMS), **settings)
    rope = comparison(
        language_model,
        dataset,
        arms_of([*ROPE_ARMS, *(VARIATIONS if dataset == VARIED else ())], ", rotary positions"),
        suffix="-rope",
        baseline_of_first=learned[0].id,  # the rotary baseline against the study's learned positions
        model=replace(LM_MODEL, position="rope"),
        **settings,
    )
    return [*learned, *rope]


EXPERIMENTS = [e for stem, dataset in SETS for e in _corpus(stem, dataset)]
