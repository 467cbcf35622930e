"""Study `gpt-cls`: phase 4's question, "the task type or the architecture?", with tuned arms."""

from __future__ import annotations

from oelm.experiments.studies.comparison import Arm, comparison
from oelm.experiments.studies.paper import classifier

SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

# arm, method, what it answers
ARMS: tuple[Arm, ...] = (
    ("baseline", "baseline", "the study's baseline, tuned"),
    ("orthogonal-init", "orthogonal-init", "the same start as the method, trained"),
    ("oelm-freeze", "oelm-freeze", "the method"),
    ("oelm-random-matched", "oelm-random-matched", "frozen Gaussian rows of the same scale"),
)

EXPERIMENTS = [
    e
    for stem, dataset in SETS
    for e in comparison(
        classifier, dataset, ARMS, stem=f"CLS-{stem}", study="gpt-cls", group=f"gpt-cls/{dataset}"
    )
]
