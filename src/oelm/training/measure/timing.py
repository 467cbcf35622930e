"""Measure step times and peak memory, and summarise them in timing_stats.json.

Complete optimizer steps are timed, with the GPU synchronised before and after each step. Validations and the
first steps of each process (while caches warm up) are not in the statistics. step_times.bin contains the time
of step n at position n, so that a resumed run continues the file and overwrites the times of repeated steps.
step_memory.bin contains, in the same way, the peak memory when step n was logged; 0 for the other steps.
Files that must be bit-identical after a resume, such as results.json and metrics.jsonl, contain neither.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oelm.cores import peak_memory
from oelm.runs.schema import TimingStats

WARMUP_STEPS = 3  # the first steps of each process are not measured, because allocators and caches warm up
_COLUMNS = ("seconds", "tokens", "flops", "full_flops")  # seconds < 0 marks a warm-up step
_TOTALS = ("total_wall_time", "total_validation_time", "num_validations", "peak_memory_bytes")
_LARGEST = 1e30  # a larger value in step_times.bin means that the file is damaged


class Timer:
    """Measures steps and validations of this process, and adds the totals of earlier processes of the run."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.device = device
        self.start(TimingStats())
        self.validation = 0.0
        self.validations = 0
        self.steps_here = 0
        self.recent: list[float] = []
        self._pending: dict[int, tuple[float, ...]] = {}
        self._memory: dict[int, tuple[float, ...]] = {}

    def start(self, earlier: TimingStats) -> None:
        """Start the clock; `earlier` contains the totals of the earlier processes of this run."""
        self.earlier = {name: _positive(getattr(earlier, name)) for name in _TOTALS}
        self.began = time.perf_counter()

    def synchronise(self) -> float:
        """Wait until the GPU has finished all work, and return the current time in seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[dict[str, float]]:
        """Measure the time of the `with` block, which must be the optimizer step `number` (from 0).

        Yield a dict in which the caller sets "tokens", "flops" and "full_flops" of the step.
        """
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
        """Measure the time of the `with` block, which must be one validation."""
        start = self.synchronise()
        yield
        self.validation += self.synchronise() - start
        self.validations += 1

    @property
    def steps_per_second(self) -> float | None:
        """The speed from the median time of recent steps, which a single slow step does not affect."""
        return 1 / float(np.median(self.recent)) if self.recent else None

    def record_memory(self, number: int) -> None:
        """Remember the peak memory of this process after the optimizer step `number` (from 0)."""
        self._memory[number] = (float(self._peak_memory()),)

    def flush(self) -> None:
        """Write what was measured since the last flush to step_times.bin and step_memory.bin."""
        _write_records(self.path, self._pending)
        _write_records(self.path.with_name("step_memory.bin"), self._memory)
        self._pending, self._memory = {}, {}

    def _table(self, steps: int) -> np.ndarray:
        """Return the content of step_times.bin as a (steps, columns) array, without damaged rows."""
        if not self.path.exists():
            return np.zeros((0, len(_COLUMNS)))
        numbers = np.fromfile(self.path, dtype="<f8", count=steps * len(_COLUMNS))
        table = numbers[: len(numbers) // len(_COLUMNS) * len(_COLUMNS)].reshape(-1, len(_COLUMNS))
        return table[(np.abs(table) < _LARGEST).all(axis=1)]

    def _peak_memory(self) -> int:
        """Return the peak memory in bytes: on the GPU if the run uses one, otherwise of the process."""
        cuda = self.device.type == "cuda"
        return int(torch.cuda.max_memory_allocated(self.device)) if cuda else peak_memory()

    def stats(self, steps: int) -> TimingStats:
        """Return the content of timing_stats.json for the first `steps` optimizer steps of the run."""
        self.flush()
        table = self._table(steps)
        measured = table[table[:, 0] > 0]
        seconds, tokens, flops, full_flops = measured.T

        def statistic(measure: Callable[..., Any], *arguments: Any, least: int = 1) -> float | None:
            with np.errstate(all="ignore"):
                value = float(measure(*arguments)) if len(seconds) >= least else math.nan
            return value if math.isfinite(value) else None

        return TimingStats(
            total_wall_time=self.earlier["total_wall_time"] + time.perf_counter() - self.began,
            num_steps_measured=len(seconds),
            warmup_steps=int((table[:, 0] < 0).sum()),
            mean_step_time=statistic(np.mean, seconds),
            std_step_time=statistic(lambda: seconds.std(ddof=1), least=2),
            median_step_time=statistic(np.median, seconds),
            min_step_time=statistic(np.min, seconds),
            max_step_time=statistic(np.max, seconds),
            p95_step_time=statistic(np.percentile, seconds, 95),
            p99_step_time=statistic(np.percentile, seconds, 99),
            total_validation_time=self.earlier["total_validation_time"] + self.validation,
            num_validations=int(self.earlier["num_validations"]) + self.validations,
            tokens_per_second=statistic(lambda: tokens.sum() / seconds.sum()),
            peak_memory_bytes=max(int(self.earlier["peak_memory_bytes"]), self._peak_memory()),
            flops_per_step=statistic(np.mean, flops),
            flops_per_second=statistic(lambda: flops.sum() / seconds.sum()),
            predicted_saving=statistic(lambda: 1 - flops.sum() / full_flops.sum()),
        )


def _write_records(path: Path, records: dict[int, tuple[float, ...]]) -> None:
    """Write each record of a step to its position in a file of float64 numbers; all have the same length."""
    if not records:
        return
    path.touch()
    with open(path, "r+b") as file:
        for number, record in sorted(records.items()):
            file.seek(number * 8 * len(record))
            file.write(np.asarray(record, dtype="<f8").tobytes())


def _positive(value: float | None) -> float:
    """Return `value`, or 0 if it is not a positive finite number (timing_stats.json may be damaged)."""
    return float(value) if value is not None and math.isfinite(value) and value > 0 else 0.0
