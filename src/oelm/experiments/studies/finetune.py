"""Study `finetune`: a pretrained encoder's Q/K kept, orthonormalised or thrown away, trained or frozen.

At full scale bert-base-uncased, at mini scale all-MiniLM-L6-v2 from pip. Every arm has the same grid of
rates, chosen by validation loss over seeds.
"""

from __future__ import annotations

from dataclasses import replace

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.paper import BERT_MODEL, BERT_OPTIM, bert_data
from oelm.methods.method import Method
from oelm.methods.registry import method as find_method
from oelm.training.config import BudgetConfig

SETS = (("SST2", "sst2"), ("MNLI", "mnli"), ("AGNEWS", "agnews"))

# In a trained model the scale to match is the one the later layers expect, not that of orthonormal rows.
RANDOM_AT_NORM = replace(find_method("oelm-random"), name="oelm-random-at-norm", gain="match")

# arm, method, what it answers
ARMS: tuple[tuple[str, str | Method, str], ...] = (
    ("baseline", "baseline", "all trained"),
    ("freeze-pretrained", "freeze-pretrained", "Q/K as they are, frozen"),
    (
        "oelm-pretrained",
        "oelm-pretrained",
        "orthonormal rows from the pretrained ones, norms matched, frozen",
    ),
    ("oelm-freeze", "oelm-freeze", "random orthonormal rows of norm 1, frozen"),
    (
        "oelm-freeze-matched",
        "oelm-freeze-matched",
        "random orthonormal rows with the norms that were there, frozen",
    ),
    ("oelm-random", "oelm-random", "the study's N(0, 0.02), frozen"),
    ("oelm-random-matched", RANDOM_AT_NORM, "random Gaussian rows with the norms that were there, frozen"),
    ("orthogonal-init", "orthogonal-init", "random orthonormal rows of norm 1, trained"),
    ("orthogonal-init-matched", "orthogonal-init-matched", "discarding without freezing, norms matched"),
)
BUDGET = BudgetConfig(batch_size=32, epochs=3, eval_every=0)

EXPERIMENTS = [
    Experiment(
        id=f"FT-{stem}-{arm}",
        study="finetune",
        title=title,
        task="classification",
        data=bert_data(dataset),
        model=BERT_MODEL,
        method=method,
        optim=BERT_OPTIM,
        budget=BUDGET,
        group=f"finetune/{dataset}",
        baseline="" if arm == "baseline" else f"FT-{stem}-baseline",
        control=f"FT-{stem}-{trained}" if (trained := find_method(method).control) else "",
        arm=arm,
        tuned=True,
    )
    for stem, dataset in SETS
    for arm, method, title in ARMS
]
