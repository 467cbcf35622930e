"""Additions to the original study: controls, arms with tuned learning rates, and the next steps it proposes.

The controls, which the original study lacks, answer two questions. Does an effect come from the norm of the
initial Q/K, or from their orthogonality? Does it come from discarding the pretrained Q/K, or from freezing
Q/K? All experiments of this module have the phase "extra" (see `catalogue.PHASES`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from oelm.config.run_config import BudgetConfig, DataConfig, ModelConfig, OptimConfig
from oelm.experiments.experiment import Experiment
from oelm.experiments.studies.comparison import ArmSpec, comparison
from oelm.experiments.studies.paper import (
    LM_BUDGET,
    LM_OPTIM,
    WIKITEXT_MINI,
    classifier,
    fine_tuned,
    language_model,
)
from oelm.methods.presets import find_method

PHASE = "extra"

# (prefix of the experiment IDs, dataset, steps of the original study on this dataset)
_LM_SETS = (
    ("TS", "tinystories", 100_000),
    ("OWT", "openwebtext", 100_000),
    ("WT103", "wikitext103", 200_000),
)
_BERT_SETS = (("XNLI", "xnli"), ("SST-2", "sst2"), ("MNLI", "mnli"))
_CLS_SETS = (("IMDB", "imdb"), ("AGNEWS", "agnews"), ("XNLI", "xnli"), ("MNLI", "mnli"))

_LM_ARMS = (
    ArmSpec("BASELINE-TUNED", "baseline", "the original study's baseline, tuned"),
    ArmSpec("FREEZE-TUNED", "oelm-freeze", "the original study's method, tuned"),
    ArmSpec("ORTHOGONAL-INIT", "orthogonal-init", "the init of FREEZE-TUNED, but trained (control)"),
    ArmSpec("RANDOM-MATCHED", "oelm-random-matched", "Gaussian rows with the norms of FREEZE-TUNED, frozen"),
)
_BERT_ARMS = (
    ArmSpec("BASELINE-TUNED", "baseline", "the original study's baseline, tuned"),
    ArmSpec("FREEZE-TUNED", "oelm-freeze", "the original study's method, tuned"),
    ArmSpec("FREEZE-PRETRAINED", "freeze-pretrained", "pretrained Q/K, frozen"),
    ArmSpec("OELM-PRETRAINED", "oelm-pretrained", "pretrained rows orthonormalised, norms kept, frozen"),
    ArmSpec("RANDOM-MATCHED", "oelm-random-matched", "Gaussian rows with the norms of FREEZE-TUNED, frozen"),
    ArmSpec("ORTHOGONAL-INIT", "orthogonal-init", "random orthonormal Q/K, trained (control)"),
)

CONTROLS: dict[str, Any] = {"study": "paper", "phase": PHASE}

# Methods that the original study proposes as next steps; they are trained only on TinyStories.
PARTIAL_2 = replace(find_method("oelm-partial"), name="oelm-partial-2", layers=2)

_NEXT_STEPS = (
    ArmSpec("PARTIAL-1", "oelm-partial", "Q/K of the last layer trained, the others frozen"),
    ArmSpec("PARTIAL-2", PARTIAL_2, "Q/K of the last two layers trained, the others frozen"),
    ArmSpec("GRADUAL", "oelm-gradual", "Q/K unfrozen layer by layer from the top"),
)


def _language_models() -> list[Experiment]:
    made = []
    for stem, dataset, steps in _LM_SETS:
        arms = (*_LM_ARMS, *(_NEXT_STEPS if stem == "TS" else ()))
        group, budget = f"GPT/{dataset}/tuned", replace(LM_BUDGET, steps=steps)
        # At scale `smoke`, the arm PARTIAL-2 needs a model with at least three layers: it trains the Q/K of
        # two layers and freezes the others. All arms that are compared with it get the same model.
        smoke = {"model.name": "smoke-3"} if stem == "TS" else {}
        made += comparison(
            language_model, dataset, arms, stem=stem, group=group, budget=budget, smoke=smoke, **CONTROLS
        )
    plain = next(e for e in made if e.id == "TS-FREEZE-TUNED")
    return [
        *made,
        replace(
            plain,
            id="TS-LAYER-RATES",
            arm="layer-rates",
            title="layer-wise learning rates: each layer has 0.9 times that of the layer above",
            optim=replace(LM_OPTIM, layer_decay=0.9),
        ),
    ]


_SEQ2SEQ_OPTIM = OptimConfig(lr=3e-4, schedule="cosine", warmup_steps=1000, clip=1.0)
_SEQ2SEQ_BUDGET = BudgetConfig(batch_size=16, steps=50_000, eval_every=1000)
_SEQ2SEQ_ARMS = (
    ArmSpec("01", "baseline", "all parameters trained"),
    ArmSpec("02", "oelm-freeze", "random orthonormal Q/K, frozen in encoder, decoder and cross attention"),
    ArmSpec("03", "freeze-pretrained", "pretrained Q/K, frozen"),
)


def _denoiser(dataset: str, model: str, **own: Any) -> Experiment:
    # Tables call the arm by its method, because an ID such as T5-01 says little.
    own["arm"] = own["method"]
    return Experiment(
        task="denoising",
        data=DataConfig(dataset=dataset, tokenizer="model", max_length=256),
        model=ModelConfig(family="hf", name=model, pretrained=True),
        optim=_SEQ2SEQ_OPTIM,
        budget=_SEQ2SEQ_BUDGET,
        mini=WIKITEXT_MINI,
        **own,
    )


def _encoder_decoders(stem: str, model: str) -> list[Experiment]:
    make = partial(_denoiser, model=model)
    group = f"{stem}/wikitext103"
    return comparison(make, "wikitext103", _SEQ2SEQ_ARMS, stem=stem, group=group, **CONTROLS)


def _fine_tuned(stem: str, dataset: str) -> list[Experiment]:
    return comparison(fine_tuned, dataset, _BERT_ARMS, stem=stem, group=f"BERT/{dataset}/tuned", **CONTROLS)


def _classifiers(stem: str, dataset: str) -> list[Experiment]:
    stem = f"GPT-CLS-{stem}"
    return comparison(classifier, dataset, _LM_ARMS, stem=stem, group=f"GPT-CLS/{dataset}/tuned", **CONTROLS)


EXPERIMENTS = [
    *_language_models(),
    *(e for stem, dataset in _BERT_SETS for e in _fine_tuned(stem, dataset)),
    *(e for stem, dataset in _CLS_SETS for e in _classifiers(stem, dataset)),
    *_encoder_decoders("T5", "google-t5/t5-small"),
    *_encoder_decoders("BART", "facebook/bart-base"),
]
