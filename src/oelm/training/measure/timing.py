"""timing_stats.json: whole optimizer steps, synchronised, warm-up and validation excluded.

One record per step is kept in step_times.bin at the place of its number, so that a resumed run goes on
with it and steps done again overwrite theirs. Times are facts about a machine: they stay out of every
file that must be the same bytes after a resume.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.files.atomic import write_json

WARMUP_STEPS = 3  # of each process: allocators, caches and kernels settle
_COLUMNS = ("seconds", "tokens", "flops", "full_flops")  # seconds < 0 marks a warm-up step
_LARGEST = 1e30  # no step takes that many seconds, tokens or FLOPs; their sum is still finite


@dataclass(frozen=True)
class Totals:
    """What earlier processes of the same run spent; read back from timing_stats.json."""

    wall: float = 0.0
    validation: float = 0.0
    validations: int = 0
    peak_memory: int = 0

    @classmethod
    def read(cls, stats: dict[str, Any]) -> Totals:
        """From the content of a timing_stats.json; a value that is not a positive number counts as 0."""

        def positive(name: str) -> float:
            value = stats.get(name)
            usable = isinstance(value, int | float) and math.isfinite(value) and value > 0
            return value if usable else 0  # type: ignore[return-value]

        return cls(
            wall=positive("total_wall_time"),
            validation=positive("total_validation_time"),
            validations=int(positive("num_validations")),
            peak_memory=int(positive("peak_memory_bytes")),
        )


class Timer:
    """Times steps and validations of one process and keeps the run's account over all of them."""

    def __init__(self, path: Path, device: torch.device, earlier: dict[str, Any] | None = None) -> None:
        self.path = path
        self.device = device
        self.before = Totals.read(earlier or {})
        self.began = time.perf_counter()
        self.validation = 0.0
        self.validations = 0
        self.steps_here = 0
        self.recent: list[float] = []
        self._pending: dict[int, tuple[float, float, float, float]] = {}

    def synchronise(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[dict[str, float]]:
        """Time the optimizer step `number` (from 0); the block fills in tokens, flops and full_flops."""
        facts = {"tokens": 0.0, "flops": 0.0, "full_flops": 0.0}
        start = self.synchronise()
        yield facts
        seconds = self.synchronise() - start
        self.steps_here += 1
        warm = self.steps_here > WARMUP_STEPS
        self._pending[number] = (
            seconds if warm else -seconds,
            facts["tokens"],
            facts["flops"],
            facts["full_flops"],
        )
        self.recent = [*self.recent[-49:], seconds]

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        start = self.synchronise()
        yield
        self.validation += self.synchronise() - start
        self.validations += 1

    @property
    def steps_per_second(self) -> float | None:
        """By the median of recent steps, which one slow step (a compilation, a busy disk) does not move."""
        return 1 / float(np.median(self.recent)) if self.recent else None

    def flush(self) -> None:
        """Write the records of the steps since the last flush."""
        if not self._pending:
            return
        self.path.touch()
        with open(self.path, "r+b") as file:
            for number, record in sorted(self._pending.items()):
                file.seek(number * 8 * len(_COLUMNS))
                file.write(np.asarray(record, dtype="<f8").tobytes())
        self._pending = {}

    def write(self, target: Path, steps: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """timing_stats.json for the first `steps` steps of the run."""
        self.flush()
        stats = self.stats(steps)
        stats.update(extra or {})
        write_json(target, stats)
        return stats

    def _table(self, steps: int) -> np.ndarray:
        """(steps, columns): the records of step_times.bin, without any that a damaged disk made of them."""
        if not self.path.exists():
            return np.zeros((0, len(_COLUMNS)))
        numbers = np.fromfile(self.path, dtype="<f8", count=steps * len(_COLUMNS))
        table = numbers[: len(numbers) // len(_COLUMNS) * len(_COLUMNS)].reshape(-1, len(_COLUMNS))
        return table[(np.abs(table) < _LARGEST).all(axis=1)]

    def stats(self, steps: int) -> dict[str, Any]:
        table = self._table(steps)
        measured = table[table[:, 0] > 0]
        seconds, tokens, flops, full_flops = measured.T

        def figure(measure: Callable[..., Any], *arguments: Any, least: int = 1) -> float | None:
            with np.errstate(all="ignore"):
                value = float(measure(*arguments)) if len(seconds) >= least else math.nan
            return value if math.isfinite(value) else None

        return {
            "total_wall_time": self.before.wall + time.perf_counter() - self.began,
            "num_steps_measured": len(seconds),
            "warmup_steps": int((table[:, 0] < 0).sum()),
            "mean_step_time": figure(np.mean, seconds),
            "std_step_time": figure(lambda: seconds.std(ddof=1), least=2),
            "median_step_time": figure(np.median, seconds),
            "min_step_time": figure(np.min, seconds),
            "max_step_time": figure(np.max, seconds),
            "p95_step_time": figure(np.percentile, seconds, 95),
            "p99_step_time": figure(np.percentile, seconds, 99),
            "total_validation_time": self.before.validation + self.validation,
            "num_validations": self.before.validations + self.validations,
            "tokens_per_second": figure(lambda: tokens.sum() / seconds.sum()),
            "peak_memory_bytes": max(self.before.peak_memory, peak_memory(self.device)),
            "flops_per_step": figure(np.mean, flops),
            "flops_per_second": figure(lambda: flops.sum() / seconds.sum()),
            "predicted_saving": figure(lambda: 1 - flops.sum() / full_flops.sum()),
        }


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest: of the device on CUDA, of the whole process on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
