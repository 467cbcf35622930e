"""Study `gpt-cls`: phase 4's question, "the task type or the architecture?", with tuned arms."""

from __future__ import annotations

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.paper import CLS_BUDGET, CLS_MODEL, CLS_OPTIM, cls_data

SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

# arm, method, what it answers
ARMS = (
    ("baseline", "baseline", "the study's baseline, tuned"),
    ("orthogonal-init", "orthogonal-init", "the same start as the method, trained"),
    ("oelm-freeze", "oelm-freeze", "the method"),
    ("oelm-random-matched", "oelm-random-matched", "frozen Gaussian rows of the same scale"),
)

EXPERIMENTS = [
    Experiment(
        id=f"CLS-{stem}-{arm}",
        study="gpt-cls",
        title=title,
        task="classification",
        data=cls_data(dataset),
        model=CLS_MODEL,
        method=method,
        optim=CLS_OPTIM,
        budget=CLS_BUDGET,
        group=f"gpt-cls/{dataset}",
        baseline="" if arm == "baseline" else f"CLS-{stem}-baseline",
        control="" if method in ("baseline", "orthogonal-init") else f"CLS-{stem}-orthogonal-init",
        arm=arm,
        tuned=True,
    )
    for stem, dataset in SETS
    for arm, method, title in ARMS
]
