"""Arms measured in turn: ABAB..., each in a process of its own, medians and intervals of their ratio.

Machines are noisy: a figure of one minute is not comparable with that of the next. So every round runs
each arm once, in an order that rotates, and only ratios within rounds are reported with an interval.
A process of its own gives each arm its own allocator and an honest peak of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from oelm.errors import OelmError, UsageError

FEW_ROUNDS = 10


def require_rounds(rounds: int) -> None:
    if rounds < 3:
        raise UsageError("an interval needs at least 3 rounds")


@dataclass(frozen=True)
class Ratio:
    """How many times as long `other` takes as `ours`, with a 95 % interval over the rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def to_dict(self) -> dict[str, float]:
        return {"value": self.median, "low": self.low, "high": self.high, "rounds": self.rounds}

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}], n = {self.rounds}"


def ratio(
    other: Sequence[float],
    ours: Sequence[float],
    *,
    of: Literal["median", "mean"] = "median",
    draws: int = 10_000,
) -> Ratio:
    """The ratio of the medians of two interleaved series. Its interval is a bootstrap of whole rounds; of few
    rounds that would be too narrow, and it is Student's t of their log ratios.

    Means instead of medians where rounds do different work, so that all of it counts.

    >>> str(ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
    '2.00x [2.00, 2.00], n = 3'
    """
    if len(other) != len(ours) or len(ours) < 2:
        raise ValueError("interleaved series have one value per round each, and two rounds or more")
    a, b = np.asarray(other, dtype=float), np.asarray(ours, dtype=float)
    center: Any = np.median if of == "median" else np.mean
    value, n = float(center(a) / center(b)), len(a)
    if n < FEW_ROUNDS:
        half = stats.t.ppf(0.975, n - 1) * np.std(np.log(a / b), ddof=1) / n**0.5
        low, high = value * np.exp(-half), value * np.exp(half)
    else:
        rounds = np.random.default_rng(0).integers(n, size=(draws, n))
        low, high = np.quantile(center(a[rounds], axis=1) / center(b[rounds], axis=1), [0.025, 0.975])
    return Ratio(value, float(low), float(high), n)


class Worker:
    """One arm in a process of its own; it steps when told to and sleeps in between."""

    def __init__(self, spec: dict[str, Any], *, threads: int) -> None:
        self.name = str(spec["arm"])
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oelm.bench.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.facts: dict[str, Any] = {}

    def wait_until_built(self) -> None:
        self.facts = self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its exit code says more, below
            print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OelmError(f"the benchmark arm '{self.name}' died with exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def interleave(
    specs: Sequence[dict[str, Any]],
    *,
    rounds: int,
    warmup: int,
    threads: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Run every arm once per round; -> of each the rounds' "seconds" and "cpu_seconds", "facts", "memory"."""
    workers: list[Worker] = []
    try:
        for spec in specs:
            progress(f"starting {spec['arm']}")
            workers.append(Worker(spec, threads=threads))
        for worker in workers:
            worker.wait_until_built()
        answers: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for index in range(warmup + rounds):
            turn = index % len(workers)
            for worker in workers[turn:] + workers[:turn]:
                answer = worker.ask("step")
                if index >= warmup:
                    answers[worker.name].append(answer)
            label = (
                f"warm-up {index + 1}/{warmup}" if index < warmup else f"round {index - warmup + 1}/{rounds}"
            )
            progress(label)
        return {
            worker.name: {
                "seconds": [answer["seconds"] for answer in answers[worker.name]],
                "cpu_seconds": [answer["cpu_seconds"] for answer in answers[worker.name]],
                "facts": worker.facts,
                "memory": worker.ask("memory"),
            }
            for worker in workers
        }
    finally:
        for worker in workers:
            worker.close()
