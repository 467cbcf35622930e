"""Estimate the parameters, steps, tokens, disk space and time of a run before it starts.

Parameters are counted on the real network with the method applied; no pretrained weights are loaded. The disk
space is an upper bound. The time comes from earlier runs of the same experiment, or if there are none, from
the number of FLOPs.
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

    from oelm.training.measure.disk import DiskPlan
    from oelm.training.measure.flops import FlopModel

GPT2_VOCABULARY = 50257
# If there is no earlier run, training is assumed to reach this fraction of the FLOP/s that large matrix
# products reach.
ASSUMED_PEAK_SHARE = 0.5

# Pretrained model -> its architecture and sizes, so that its parameters can be counted without a download.
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
    """What one run needs, estimated before it starts. A number that cannot be known yet is None."""

    folder: Path
    steps: int | None
    tokens: int | None  # tokens in training, if every row has max_length tokens (an upper bound)
    parameters: dict[str, int] | None
    parameters_note: str  # why `parameters` is None
    disk_bytes: int | None
    seconds: float | None
    time_basis: str  # where `seconds` comes from, or why it is None
    kept_bytes: int | None = None  # part of `disk_bytes` that a finished run keeps: its best model

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}

    @property
    def steps_text(self) -> str:
        return f"{self.steps:,}" if self.steps else "depends on the data (epochs)"

    @property
    def tokens_text(self) -> str:
        return f"{self.tokens:,}" if self.tokens else "depends on the data"


def estimate(config: RunConfig, root: Path | str, device: str = "auto") -> Plan:
    """Return what a run with this config needs.

    The time comes from earlier runs in the runs folder `root`, or if there are none, from the FLOPs. The
    network is built for this, which takes seconds; nothing is downloaded.

    device: the device that the run is trained on, as in `--device`
    """
    steps = planned_steps(config)
    rows = config.budget.rows_per_step
    tokens = steps * rows * config.data.max_length if steps else None
    counts, model, note = count_parameters(config)
    target = config.data.max_length if config.task == "denoising" else 0
    flops = model.step(rows, config.data.max_length, target).total if model else None
    seconds, basis = _time(config, root, steps, flops, device)
    plan = Plan(run_path(root, config), steps, tokens, counts, note, None, seconds, basis)
    if counts is None:
        return plan
    disk = _disk(counts)
    return replace(plan, disk_bytes=disk.total, kept_bytes=disk.best)


def planned_steps(config: RunConfig) -> int | None:
    """Return the number of optimizer steps of a run; None if it depends on a dataset of unknown size.

    An epoch of a language model depends on the number of tokens, which is not known before preparation.
    """
    steps, epochs = config.budget.steps, config.budget.epochs
    if not epochs or config.task != "classification":
        return steps or None
    rows = dataset(config.data.dataset).sizes.get("train", 0)
    if config.data.train_rows:
        rows = min(rows or config.data.train_rows, config.data.train_rows)
    if not rows:
        return steps or None
    by_epochs = epochs * math.ceil(rows / config.budget.rows_per_step)
    return min(steps, by_epochs) if steps else by_epochs


def count_parameters(config: RunConfig) -> tuple[dict[str, int] | None, FlopModel | None, str]:
    """Return (parameter counts, counter of FLOPs, ""), or (None, None, why they cannot be counted)."""
    from oelm.methods.apply import apply
    from oelm.methods.param_groups import param_groups
    from oelm.training.measure.flops import flop_model

    try:
        network = _network(config)
        # The init of Q/K does not change the number of parameters, so use "keep", which computes nothing.
        applied = apply(network, replace(config.method, init="keep", gain=1.0), seed=0)
    except OelmError as error:
        return None, None, str(error)
    # As in results.json, a parameter that is trainable in any step counts as trainable.
    trained = sum(p.numel() for group in param_groups(network, lr=1.0) for p in group["params"])
    counts = {
        "total": applied.total,
        "trainable": trained,
        "frozen": applied.total - trained,
        "qk_total": applied.qk_total,
        "qk_trainable": applied.qk_trainable,
    }
    return counts, flop_model(network), ""


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


def _disk(counts: dict[str, int]) -> DiskPlan:
    """Return an upper bound of the disk space that a run needs.

    counts: parameter counts; a checkpoint contains each parameter in fp32, and two Adam moments for each
        trainable one
    """
    from oelm.training.measure.disk import DiskPlan

    weights, moments = 4 * counts["total"], 8 * counts["trainable"]
    return DiskPlan(checkpoint=weights + moments, best=weights)


def _time(
    config: RunConfig, root: Path | str, steps: int | None, flops: float | None, device_name: str
) -> tuple[float | None, str]:
    if steps is None:
        return None, "the number of steps depends on the data"
    measured = _median_step_time(config, root)
    if measured is not None:
        return steps * measured, "from earlier runs of this experiment in the runs folder"
    if flops is None:
        return None, "unknown, because the parameters cannot be counted"
    from oelm.training.measure.flops import gemm_peak
    from oelm.training.parallel.world import choose_device

    device = choose_device(device_name)
    speed = gemm_peak(device) * ASSUMED_PEAK_SHARE
    share = f"{100 * ASSUMED_PEAK_SHARE:.0f} %"
    return (
        steps * flops / speed,
        f"if this {device.type} trains at {share} of its speed in large matrix products",
    )


def _median_step_time(config: RunConfig, root: Path | str) -> float | None:
    """Return the median seconds per step of earlier runs of this experiment at this scale, or None."""
    place = run_path(root, replace(config, tune=replace(config.tune, trial=False))).parent
    found = []
    for file in place.glob("seed=*/timing_stats.json"):
        try:
            found.append(float(read_json_object(file)["median_step_time"]))
        except (OelmError, OSError, ValueError, TypeError, KeyError):
            continue
    return median(found) if found else None
