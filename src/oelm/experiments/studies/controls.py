"""What the study lacks: arms that separate scale from orthogonality and discarding from freezing, tuned
arms, and its named next steps. All in phase 5, beside the experiments they control for."""

from __future__ import annotations

from dataclasses import replace

from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.paper import (
    BERT_MODEL,
    BERT_OPTIM,
    CLS_BUDGET,
    CLS_MODEL,
    CLS_OPTIM,
    LM_BUDGET,
    LM_MODEL,
    LM_OPTIM,
    WIKITEXT_MINI,
    bert_budget,
    bert_data,
    cls_data,
    lm_data,
)
from oelm.methods.method import Method
from oelm.methods.registry import method as find_method
from oelm.training.config import BudgetConfig, DataConfig, ModelConfig, OptimConfig

PHASE = 5

# ID stem, dataset, steps of the study's own runs on it
_LM_SETS = (
    ("TS", "tinystories", 100_000),
    ("OWT", "openwebtext", 100_000),
    ("WT103", "wikitext103", 200_000),
)
_BERT_SETS = (("XNLI", "xnli"), ("SST-2", "sst2"), ("MNLI", "mnli"))
_CLS_SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

# arm of the ID, method, what it answers
_LM_ARMS = (
    ("BASELINE-TUNED", "baseline", "the study's baseline with a rate chosen from the common grid"),
    ("FREEZE-TUNED", "oelm-freeze", "the method with a rate chosen from the common grid"),
    ("ORTHOGONAL-INIT", "orthogonal-init", "the same start, trained: the fair plain baseline"),
    ("RANDOM-MATCHED", "oelm-random-matched", "frozen Gaussian rows of the same scale: is it orthogonality?"),
)
_BERT_ARMS = (
    ("BASELINE-TUNED", "baseline", "the baseline with a rate chosen from the common grid"),
    ("FREEZE-TUNED", "oelm-freeze", "the method with a rate chosen from the common grid"),
    ("FREEZE-PRETRAINED", "freeze-pretrained", "Q/K as they are, frozen: the control that matters here"),
    (
        "OELM-PRETRAINED",
        "oelm-pretrained",
        "orthonormal rows from the pretrained ones: what the study's code did",
    ),
    ("RANDOM-MATCHED", "oelm-random-matched", "frozen Gaussian rows of the same scale"),
    ("ORTHOGONAL-INIT", "orthogonal-init", "random orthonormal Q/K, trained: is it discarding or freezing?"),
)


def _lm(
    stem: str, arm: str, dataset: str, method: str | Method, steps: int, title: str, **rest: object
) -> Experiment:
    mini = dict(WIKITEXT_MINI) if dataset == "wikitext103" else {}
    made = Experiment(
        id=f"{stem}-{arm}",
        study="paper",
        phase=PHASE,
        title=title,
        task="lm",
        data=lm_data(dataset),
        model=LM_MODEL,
        method=method,
        optim=LM_OPTIM,
        budget=replace(LM_BUDGET, steps=steps),
        group=f"GPT/{dataset}/tuned",
        baseline="" if arm == "BASELINE-TUNED" else f"{stem}-BASELINE-TUNED",
        control="" if method in ("baseline", "orthogonal-init") else f"{stem}-ORTHOGONAL-INIT",
        arm=arm.lower(),
        tuned=True,
        mini=mini,
    )
    return replace(made, **rest)  # type: ignore[arg-type]


def _bert(stem: str, dataset: str, arm: str, method: str, title: str) -> Experiment:
    return Experiment(
        id=f"{stem}-{arm}",
        study="paper",
        phase=PHASE,
        title=title,
        task="classification",
        data=bert_data(dataset),
        model=BERT_MODEL,
        method=method,
        optim=BERT_OPTIM,
        budget=bert_budget(dataset),
        group=f"BERT/{dataset}/tuned",
        baseline="" if arm == "BASELINE-TUNED" else f"{stem}-BASELINE-TUNED",
        arm=arm.lower(),
        tuned=True,
    )


def _cls(stem: str, dataset: str, arm: str, method: str, title: str) -> Experiment:
    return Experiment(
        id=f"GPT-CLS-{stem}-{arm}",
        study="paper",
        phase=PHASE,
        title=title,
        task="classification",
        data=cls_data(dataset),
        model=CLS_MODEL,
        method=method,
        optim=CLS_OPTIM,
        budget=CLS_BUDGET,
        group=f"GPT-CLS/{dataset}/tuned",
        baseline="" if arm == "BASELINE-TUNED" else f"GPT-CLS-{stem}-BASELINE-TUNED",
        control="" if method in ("baseline", "orthogonal-init") else f"GPT-CLS-{stem}-ORTHOGONAL-INIT",
        arm=arm.lower(),
        tuned=True,
    )


# Next steps the study names, on the corpus it began with.
PARTIAL_1 = replace(find_method("oelm-partial"), name="oelm-partial-1", layers=1)

_NEXT_STEPS = [
    _lm("TS", "PARTIAL-1", "tinystories", PARTIAL_1, 100_000, "the last layer's Q/K train"),
    _lm("TS", "PARTIAL-2", "tinystories", "oelm-partial", 100_000, "the last two layers' Q/K train"),
    _lm("TS", "GRADUAL", "tinystories", "oelm-gradual", 100_000, "Q/K thaw from the top down over the run"),
    _lm(
        "TS",
        "LAYER-RATES",
        "tinystories",
        "oelm-freeze",
        100_000,
        "layer-wise learning rates: each layer 0.9 of the one above",
        optim=replace(LM_OPTIM, layer_decay=0.9),
    ),
]

_SEQ2SEQ_OPTIM = OptimConfig(lr=3e-4, schedule="cosine", warmup_steps=1000, clip=1.0)
_SEQ2SEQ_BUDGET = BudgetConfig(batch_size=16, steps=50_000, eval_every=1000)


def _seq2seq(number: int, stem: str, name: str, method: str, title: str) -> Experiment:
    return Experiment(
        id=f"{stem}-{number:02d}",
        study="paper",
        phase=PHASE,
        title=title,
        task="denoising",
        data=DataConfig(dataset="wikitext103", tokenizer="model", max_length=256),
        model=ModelConfig(family="hf", name=name, pretrained=True),
        method=method,
        optim=_SEQ2SEQ_OPTIM,
        budget=_SEQ2SEQ_BUDGET,
        group=f"{stem}/wikitext103",
        baseline="" if number == 1 else f"{stem}-01",
        tuned=True,
        mini=dict(WIKITEXT_MINI),
    )


_ENCODER_DECODERS = [
    _seq2seq(number, stem, name, method, f"{label} denoising: {what}")
    for stem, name, label in (
        ("T5", "google-t5/t5-small", "T5"),
        ("BART", "facebook/bart-base", "BART"),
    )
    for number, method, what in (
        (1, "baseline", "all trained"),
        (2, "oelm-freeze", "Q/K drawn anew and frozen in encoder, decoder and cross attention"),
        (3, "freeze-pretrained", "Q/K as they are, frozen"),
    )
]

EXPERIMENTS = [
    *(
        _lm(stem, arm, dataset, method, steps, title)
        for stem, dataset, steps in _LM_SETS
        for arm, method, title in _LM_ARMS
    ),
    *(
        _bert(stem, dataset, arm, method, title)
        for stem, dataset in _BERT_SETS
        for arm, method, title in _BERT_ARMS
    ),
    *(
        _cls(stem, dataset, arm, method, title)
        for stem, dataset in _CLS_SETS
        for arm, method, title in _LM_ARMS
    ),
    *_NEXT_STEPS,
    *_ENCODER_DECODERS,
]
