"""The option `--gpu`: print the hours and memory predicted for a GPU, which need not be in this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from oelm.cli.output import print, print_table
from oelm.config.run_config import RunConfig
from oelm.units import bytes_text, duration_text

if TYPE_CHECKING:
    from oelm.experiments.predict import Prediction

GpuName = Annotated[
    str,
    Parameter(name="--gpu", help="Also print the hours predicted for this GPU: A5000, A100, H100 or 4090."),
]


def gpu_predictions(arms: Sequence[tuple[RunConfig, float]], gpu: str, runs: str) -> list[Prediction]:
    """Return a prediction for each of `arms`, which are pairs of a config and its number of runs."""
    from oelm.experiments.predict import Predictor, find_gpu

    predictor = Predictor(find_gpu(gpu), runs)
    return [predictor.predict(config) for config, _ in arms]


def gpu_facts(arms: Sequence[tuple[RunConfig, float]], gpu: str, runs: str) -> dict[str, Any]:
    found = gpu_predictions(arms, gpu, runs)
    each = [
        {"id": config.id, "scale": config.scale, "runs": count, **p.to_dict()}
        for (config, count), p in zip(arms, found, strict=True)
    ]
    return {"predictions": each, "seconds": _total(arms, found)}


def print_gpu_hours(arms: Sequence[tuple[RunConfig, float]], gpu: str, runs: str) -> None:
    """Print a table with the step time, memory and hours of each arm, then their sum and the assumptions."""
    found = gpu_predictions(arms, gpu, runs)
    rows = [
        (
            config.id,
            config.scale,
            f"{1000 * p.step_seconds:.3g} ms",
            bytes_text(p.memory_bytes),
            duration_text(p.seconds),
            f"{count:g}",
        )
        for (config, count), p in zip(arms, found, strict=True)
    ]
    print()
    print_table((f"on {found[0].gpu}", "scale", "per step", "memory", "per run", "runs"), rows)
    print(f"{duration_text(_total(arms, found))} for all runs, one at a time; {found[0].assumption}")


def _total(arms: Sequence[tuple[RunConfig, float]], found: Sequence[Prediction]) -> float | None:
    seconds = [(p.seconds, count) for (_, count), p in zip(arms, found, strict=True)]
    return None if any(s is None for s, _ in seconds) else sum((s or 0.0) * count for s, count in seconds)
