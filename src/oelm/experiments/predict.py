"""Predict what a run needs on a named GPU: seconds per step, memory, and what several GPUs exchange.

The step time is the time of the matrix products, at an assumed fraction of the GPU's peak FLOP/s (bf16,
dense), plus the time to read and write GPU memory, at an assumed fraction of its bandwidth:

- AdamW reads and writes 28 bytes per trainable parameter (fp32 weight, gradient and two moments);
- autocast reads each fp32 weight and writes a bf16 copy: 6 bytes per parameter;
- a layer keeps about 34 bytes per token and unit of width for its backward pass (Korthikanti et al. 2022,
  without the attention matrix, which fused attention does not store), written once and read twice;
- the logits of a language model cost about 12 bytes each.

With a small model, the GPU waits for the CPU, so a step takes at least the time to start its kernels.

If the runs folder has runs of the same study on a GPU in `GPUS`, the predicted step time is multiplied by the
median ratio of their measured to their predicted step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.plan import count_parameters, planned_steps
from oelm.runs.folder import RunFolder
from oelm.units import bytes_text, duration_text

if TYPE_CHECKING:
    from oelm.training.measure.flops import FlopModel

PEAK_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
KERNEL_SECONDS = 10e-6  # time to start one GPU kernel
KERNELS_PER_LAYER = 60  # kernels of the forward pass, the backward pass and the optimizer step of one layer


@dataclass(frozen=True)
class Gpu:
    """Speed and memory of a GPU, from its data sheet."""

    name: str
    flops: float  # FLOP/s of dense bf16 matrix products that are summed in fp32
    bandwidth: float  # of the memory of the GPU, in bytes per second
    memory: float  # bytes


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A5000", 111e12, 768e9, 24e9),
        Gpu("A100", 312e12, 2039e9, 80e9),
        Gpu("H100", 989e12, 3350e9, 80e9),
        Gpu("4090", 165e12, 1008e9, 24e9),
    )
}


@dataclass(frozen=True)
class Prediction:
    """What one run of a config needs on one GPU; predicted, not measured."""

    gpu: str
    steps: int | None  # None if it depends on a dataset of unknown size
    flops: float  # FLOPs of one step
    moved_bytes: float  # bytes that one step reads from and writes to GPU memory
    step_seconds: float
    memory_bytes: float
    ddp_bytes: float  # gradients that each of two GPUs sends per step, with replicated weights
    ddp_bytes_saved: float  # bytes that are not sent, because frozen parameters have no gradients
    fsdp_bytes: float  # weights and gradients that each of two GPUs receives per step, with sharded weights
    fsdp_bytes_saved: float
    correction: float = 1.0  # measured / predicted step time, by which `step_seconds` was multiplied
    corrected_by: int = 0  # number of measured experiments from which `correction` was computed

    @property
    def seconds(self) -> float | None:
        """Time of all training steps; validation and start-up are not included."""
        return self.steps * self.step_seconds if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "assumed": self.assumption}

    @property
    def assumption(self) -> str:
        gpu = GPUS[self.gpu]
        text = (
            f"predicted, not measured: {gpu.name} with {gpu.flops / 1e12:.0f} TFLOP/s (bf16, dense) used at "
            f"{100 * PEAK_SHARE:.0f} %, and {gpu.bandwidth / 1e9:.0f} GB/s used at "
            f"{100 * BANDWIDTH_SHARE:.0f} %; at least {1e6 * KERNEL_SECONDS:.0f} µs per kernel; "
            "training steps only"
        )
        if self.corrected_by:
            return (
                f"{text}; multiplied by {self.correction:.2f}, from {self.corrected_by} measured experiments"
            )
        return f"{text}; not yet corrected by a measured run"

    def rows(self) -> list[tuple[str, str]]:
        """Return the prediction as rows of a table: (name, value)."""
        fits = "" if self.memory_bytes <= GPUS[self.gpu].memory else ", which is more than this GPU has"
        time = f", {duration_text(self.seconds)} per run" if self.seconds else ""
        return [
            (f"on {self.gpu}", f"{1000 * self.step_seconds:.3g} ms per step{time}"),
            ("GPU memory", f"{bytes_text(self.memory_bytes)} (bf16 autocast, AdamW){fits}"),
            ("on 2 GPUs, DDP", _sent(self.ddp_bytes, self.ddp_bytes_saved)),
            ("on 2 GPUs, FSDP", _sent(self.fsdp_bytes, self.fsdp_bytes_saved)),
            ("basis", self.assumption),
        ]


def _sent(sent: float, saved: float) -> str:
    share = f", {100 * saved / (sent + saved):.1f} % less through frozen parameters" if saved else ""
    return f"{bytes_text(sent)} per step and GPU{share}"


def find_gpu(name: str) -> Gpu:
    """Return a GPU by a name such as "A100" or "NVIDIA A100-SXM4-80GB"."""
    for gpu in GPUS.values():
        if gpu.name in name.upper():
            return gpu
    raise UsageError(f"--gpu {name}: the speed of this GPU is not known; use one of {', '.join(GPUS)}")


class Predictor:
    """Predicts what runs need on one GPU; runs of the same study in the runs folder correct the step time."""

    def __init__(self, gpu: Gpu, root: Path | str) -> None:
        self.gpu, self.root = gpu, Path(root)
        self._known: dict[tuple[object, ...], Prediction] = {}
        self._ratios: dict[str, list[float]] = {}

    def predict(self, config: RunConfig) -> Prediction:
        """Return what one run of `config` needs; this builds the network, but downloads nothing."""
        key = (config.task, config.data, config.model, config.budget, config.method)
        if key not in self._known:
            self._known[key] = _predict(config, self.gpu)
        if config.study not in self._ratios:
            self._ratios[config.study] = _measured_ratios(self.root / config.study)
        plain, ratios = self._known[key], self._ratios[config.study]
        if not ratios:
            return plain
        factor = median(ratios)
        return replace(
            plain,
            step_seconds=plain.step_seconds * factor,
            correction=factor,
            corrected_by=len(ratios),
        )


def _predict(config: RunConfig, gpu: Gpu) -> Prediction:
    from oelm.models.loss import CHUNK_ELEMENTS

    counts, model, note = count_parameters(config)
    if counts is None or model is None:
        raise OelmError(f"{config.id} cannot be predicted: {note}")
    rows, length = config.budget.rows_per_step, config.data.max_length
    target = length if config.task == "denoising" else 0
    flops = model.step(rows, length, target).total
    total, trainable = counts["total"], counts["trainable"]
    tokens, micro_tokens = rows * length, config.budget.batch_size * length
    kept = 34 * sum(width for _, width, _ in model.attention)  # bytes kept per token for the backward pass
    words = _logits_per_token(model, config)
    kernels = KERNELS_PER_LAYER * (1 + len(model.attention)) * config.budget.accumulation
    moved = 28 * trainable + 6 * total * config.budget.accumulation + tokens * (3 * kept + 12 * words)
    return Prediction(
        gpu.name,
        planned_steps(config),
        flops,
        moved,
        max(
            flops / (PEAK_SHARE * gpu.flops) + moved / (BANDWIDTH_SHARE * gpu.bandwidth),
            kernels * KERNEL_SECONDS,
        ),
        6 * total + 12 * trainable + micro_tokens * kept + 10 * min(words * micro_tokens, CHUNK_ELEMENTS),
        # On two GPUs with DDP, each GPU sends every fp32 gradient once (ring all-reduce). With FSDP, each GPU
        # receives the other half of the weights twice, for the forward and the backward pass, and then half
        # of the gradients.
        ddp_bytes=4 * trainable,
        ddp_bytes_saved=4 * (total - trainable),
        fsdp_bytes=2 * 2 * total + 2 * trainable,
        fsdp_bytes_saved=2 * (total - trainable),
    )


def _logits_per_token(model: FlopModel, config: RunConfig) -> int:
    if config.task == "classification" or not model.attention:
        return 0
    heads = [p.size for p in model.products if p.name == "tied head" or "lm_head" in p.name]
    return max(heads, default=0) // model.attention[0][1]


def _measured_ratios(study: Path) -> list[float]:
    """Return measured / predicted seconds per step, one for each experiment and scale that ran on a GPU."""
    found = []
    for scale in sorted(study.glob("*/scale=*")):
        ratios: list[float] = []  # one per run, because the seeds may have run on different GPUs
        for path in sorted(scale.glob("seed=*")):
            folder = RunFolder(path)
            try:
                timing, manifest = folder.timing(), folder.manifest()
                names: Sequence[str] = manifest.machine.get("gpus", ()) if manifest else ()
                if timing is None or not timing.median_step_time or not names:
                    continue
                config, gpu = folder.config(), find_gpu(str(names[0]))
                ratios.append(timing.median_step_time / _predict(config, gpu).step_seconds)
            except (OelmError, OSError):
                continue
        if ratios:
            found.append(median(ratios))
    return found
