"""Estimate what a run needs before it starts: parameters, steps, tokens, disk and time.

Parameters are counted on the real network with the method applied, without files of a pretrained model.
Disk is an upper bound. Time comes from earlier runs of the same experiment, or else from FLOPs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from oelm.config.run_config import RunConfig
from oelm.data.catalogue import dataset
from oelm.errors import OelmError
from oelm.files.read import read_json_object
from oelm.runs.layout import run_path

if TYPE_CHECKING:
    from torch import nn

GPT2_VOCABULARY = 50257
# Training is assumed to reach this share of the FLOPS of large matrix products, if no run was timed.
ASSUMED_PEAK_SHARE = 0.5

# Shapes of the original study's pretrained models, so that they can be counted without a download.
KNOWN_SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "bert-base-uncased": ("bert", {}),
    "google-t5/t5-small": ("t5", {}),
    "facebook/bart-base": (
        "bart",
        {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "vocab_size": 50265}
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
        | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
    ),
}


@dataclass(frozen=True)
class Plan:
    """What one run needs; None for what cannot be known yet, with the reason in a note."""

    folder: Path
    steps: int | None
    tokens: int | None  # seen in training; an upper bound for classification
    parameters: dict[str, int] | None
    parameters_note: str
    disk_bytes: int | None
    seconds: float | None
    time_basis: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    @property
    def steps_text(self) -> str:
        return f"{self.steps:,}" if self.steps else "depends on the data (epochs)"

    @property
    def tokens_text(self) -> str:
        return f"{self.tokens:,}" if self.tokens else "depends on the data"


def estimate(config: RunConfig, root: Path | str) -> Plan:
    """The plan of one run. It builds the network, which takes seconds, but never downloads anything."""
    steps = planned_steps(config)
    rows = config.budget.batch_size * config.budget.accumulation
    tokens = steps * rows * config.data.max_length if steps else None
    counts, flops, note = _count(config, rows)
    disk = _disk(counts) if counts else None
    seconds, basis = _time(config, root, steps, flops)
    return Plan(run_path(root, config), steps, tokens, counts, note, disk, seconds, basis)


def planned_steps(config: RunConfig) -> int | None:
    """The number of optimizer steps; None if it depends on data whose size is not known."""
    if config.budget.steps:
        return config.budget.steps
    rows = dataset(config.data.dataset).sizes.get("train", 0)
    if config.data.train_rows:
        rows = min(rows or config.data.train_rows, config.data.train_rows)
    if not rows:
        return None
    return config.budget.epochs * math.ceil(rows / (config.budget.batch_size * config.budget.accumulation))


def _count(config: RunConfig, rows: int) -> tuple[dict[str, int] | None, float | None, str]:
    """(parameter counts, FLOPs of one step, ""), or (None, None, the reason)."""
    from oelm.methods.apply import apply
    from oelm.training.measure.flops import flop_model

    try:
        network = _network(config)
        # The init does not change any count, and "keep" is the fastest one.
        applied = apply(network, replace(config.method, init="keep", gain=1.0), seed=0)
    except OelmError as error:
        return None, None, str(error)
    counts = {
        name: int(getattr(applied, name))
        for name in ("total", "trainable", "frozen", "qk_total", "qk_trainable")
    }
    length = config.data.max_length
    target = length if config.task == "denoising" else 0
    return counts, flop_model(network).step(rows, length, target).total, ""


def _network(config: RunConfig) -> nn.Module:
    from oelm.training.build_model import build_model

    classes = len(dataset(config.data.dataset).label_names) if config.task == "classification" else 0
    name = config.model.name
    if config.model.family == "hf" and name in KNOWN_SHAPES:
        return _from_shape(*KNOWN_SHAPES[name], classes=classes)
    vocabulary = _vocabulary(config)
    return build_model(config, vocab_size=vocabulary, classes=classes, pad_id=0, eos_id=1)


def _from_shape(kind: str, fields: dict[str, int], classes: int) -> nn.Module:
    import transformers as hf

    if classes:
        shape = hf.AutoConfig.for_model(kind, num_labels=classes, **fields)
        return hf.AutoModelForSequenceClassification.from_config(shape)
    return hf.AutoModelForSeq2SeqLM.from_config(hf.AutoConfig.for_model(kind, **fields))


def _vocabulary(config: RunConfig) -> int:
    name = config.data.tokenizer
    return int(name.removeprefix("bpe-")) if name.startswith("bpe-") else GPT2_VOCABULARY


def _disk(counts: dict[str, int]) -> int:
    """Bytes on disk at most: fp32 weights, and two Adam moments for each trainable parameter."""
    from oelm.training.measure.disk import DiskPlan

    weights, moments = 4 * counts["total"], 8 * counts["trainable"]
    return DiskPlan(checkpoint=weights + moments, best=weights).total


def _time(
    config: RunConfig, root: Path | str, steps: int | None, flops: float | None
) -> tuple[float | None, str]:
    if steps is None:
        return None, "the number of steps depends on the data"
    measured = _median_step_time(config, root)
    if measured is not None:
        return steps * measured, "from earlier runs of this experiment here"
    if flops is None:
        return None, "unknown"
    import torch

    from oelm.training.measure.flops import gemm_peak

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed = gemm_peak(device) * ASSUMED_PEAK_SHARE
    share = f"{ASSUMED_PEAK_SHARE:.0%}"
    return steps * flops / speed, f"if this {device.type} reaches {share} of its matrix-product speed"


def _median_step_time(config: RunConfig, root: Path | str) -> float | None:
    """Seconds per step in earlier runs of the experiment at this scale; None if there is none."""
    place = run_path(root, replace(config, tune=replace(config.tune, trial=False))).parent
    found = []
    for file in place.glob("seed=*/timing_stats.json"):
        try:
            found.append(float(read_json_object(file)["median_step_time"]))
        except (OelmError, OSError, ValueError, TypeError, KeyError):
            continue
    return median(found) if found else None
