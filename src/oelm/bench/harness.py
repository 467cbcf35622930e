"""Compare the step times of several arms (methods or tools), each in its own process.

Step times are noisy. The first step of an arm after another arm has run is slower, for example because the
caches hold the data of the other arm. Therefore:

- Arms take turns. A turn is several consecutive steps of one arm; its first step is not counted.
- In a round, each arm has one turn; the order of the arms is shuffled in every round.
- The comparison is repeated with new processes, because the memory layout of a process changes its speed and
  stays the same until it ends. The rounds of one process are averaged, and the confidence interval is
  computed over processes.

Arms of other tools are not in memory together (see `measure_alone()`). Minutes may pass between two of them,
and the speed of a virtual machine can change by half in that time. So each step is divided by the time of a
reference computation (matrix products), which the process of the arm measures before and after the step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from oelm.analysis.statistics.intervals import LEVEL, t_quantile
from oelm.cores import OPENMP_WAITING, usable_cores
from oelm.errors import OelmError, UsageError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The number of processes, rounds and steps of a benchmark.

    processes: new processes per arm
    rounds:    rounds per process; in each round, every arm has one turn
    steps:     counted steps per turn
    warmup:    steps of each process before its first turn
    threads:   CPU threads per process; 0 = one per core
    """

    processes: int = 3
    rounds: int = 4
    steps: int = 3
    warmup: int = 2
    threads: int = 0

    def __post_init__(self) -> None:
        if self.processes < 3:
            raise UsageError(
                f"{self.processes} processes per arm are too few: a confidence interval needs at least 3"
            )
        if self.rounds < 1 or self.steps < 1:
            raise UsageError(
                f"a benchmark needs at least 1 round and 1 step, not {self.rounds} and {self.steps}"
            )

    @property
    def thread_count(self) -> int:
        return self.threads or usable_cores()


@dataclass(frozen=True)
class Ratio:
    """The step time of one arm divided by that of another, with a 95 % confidence interval over processes."""

    value: float
    low: float
    high: float
    processes: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(arm: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> Ratio:
    """Return the ratio of the step times of two arms, each given as `times[process][round]`.

    The arms are compared within each round, because other programs on the machine then slow both arms. The
    log ratios of one process are averaged over its rounds. The confidence interval is Student's t over
    processes.

    >>> str(ratio([[2.0, 4.0], [6.0, 2.0], [2.0, 2.0]], [[1.0, 2.0], [3.0, 1.0], [1.0, 1.0]]))
    '2.00 [2.00, 2.00]'
    """
    if [len(p) for p in arm] != [len(p) for p in reference] or len(arm) < 2:
        raise ValueError(
            "the arms cannot be compared: give at least two processes of each arm, and the same number of "
            "rounds for both arms in each process"
        )
    logs = [np.log(np.divide(a, b)).mean() for a, b in zip(arm, reference, strict=True)]
    center, n = float(np.mean(logs)), len(logs)
    half = float(t_quantile(LEVEL, n - 1) * np.std(logs, ddof=1) / n**0.5)
    return Ratio(float(np.exp(center)), float(np.exp(center - half)), float(np.exp(center + half)), n)


@dataclass
class Measured:
    """The measurements of one arm.

    steps:  seconds of each counted step, as `steps[process][round][step]`
    facts:  what the arm reported when it was built, such as parameter counts
    memories: bytes by kind, such as "peak_bytes", of each process
    reference: seconds of the reference computation around each counted step, in the shape of `steps`; [] if
        the arms took turns
    """

    steps: list[list[list[float]]]
    facts: dict[str, Any]
    memories: list[dict[str, int]]
    reference: list[list[list[float]]] = field(default_factory=list)

    @property
    def times(self) -> list[list[list[float]]]:
        """The step times for comparisons, in the shape of `steps`.

        In seconds; if the reference computation was timed, in units of its time around each step.
        """
        if not self.reference:
            return self.steps
        return [
            [np.divide(*turn).tolist() for turn in zip(*process, strict=True)]
            for process in zip(self.steps, self.reference, strict=True)
        ]

    @property
    def rounds(self) -> list[list[float]]:
        """The mean of `times` in each round, as `rounds[process][round]`."""
        return [[statistics.fmean(turn) for turn in turns] for turns in self.times]

    @property
    def memory(self) -> dict[str, int]:
        """The median over processes of the bytes of each kind."""
        return {kind: round(statistics.median(m[kind] for m in self.memories)) for kind in self.memories[0]}

    @property
    def median_seconds(self) -> float:
        return median_of(self.steps)

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": _rounded(self.steps),
            "reference": _rounded(self.reference),
            "facts": self.facts,
            "memory": self.memory,
        }


def median_of(times: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the median of all `times[process][round][step]`."""
    return statistics.median(t for turns in times for turn in turns for t in turn)


def _rounded(times: list[list[list[float]]]) -> list[list[list[float]]]:
    return [[[round(t, 6) for t in turn] for turn in turns] for turns in times]


class ArmProcess:
    """Controls the worker process of one arm, which sleeps between its turns (several consecutive steps)."""

    def __init__(self, spec: Mapping[str, Any], *, threads: int) -> None:
        self.name = str(spec["arm"])
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            **OPENMP_WAITING,  # the threads of a sleeping arm must not slow the running arm
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "oelm.bench.worker", json.dumps(dict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def turn(self, steps: int) -> tuple[list[float], list[float]]:
        """Run `steps` steps; return the seconds of each, and of the reference computation around each."""
        answer = self._ask({"steps": steps})
        return answer["seconds"], answer["reference"]

    def memory(self) -> dict[str, int]:
        return self._ask({"memory": True})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, which `answer()` reports
            print(json.dumps(command), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer of the worker process; the first answer is `Measured.facts`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OelmError(
                f"the process of the benchmark arm '{self.name}' ended with exit code {self._process.wait()}",
                remedy="its output above shows why.",
            )
        return json.loads(line)

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure_together(
    specs: Sequence[Mapping[str, Any]], plan: Plan, progress: Progress = lambda text: None
) -> dict[str, Measured]:
    """Return the measurements of all arms, by name; all arms are in memory and take turns.

    The turns of the arms follow each other closely, so a machine whose speed varies changes the ratios less.
    """
    found: dict[str, Measured] = {}
    for generation in range(plan.processes):
        _measure_generation(specs, plan, found, generation, progress)
    return found


def measure_alone(
    specs: Sequence[Mapping[str, Any]], plan: Plan, progress: Progress = lambda text: None
) -> dict[str, Measured]:
    """Return the measurements of all arms, by name, each measured while no other arm is in memory.

    Comparisons with other tools need this. A tool that returns memory to the operating system after each step
    becomes slower if other arms are in memory, so `measure_together()` makes it look slower than it is.
    """
    found: dict[str, Measured] = {}
    for generation in range(plan.processes):
        for spec in random.Random(generation).sample(list(specs), len(specs)):
            _measure_generation([{**spec, "reference": True}], plan, found, generation, progress)
    return {spec["arm"]: found[spec["arm"]] for spec in specs}  # in the order of the arms


def _measure_generation(
    specs: Sequence[Mapping[str, Any]],
    plan: Plan,
    found: dict[str, Measured],
    generation: int,
    progress: Progress,
) -> None:
    """Start one new process per arm, measure all rounds, and add the measurements to `found`.

    generation: how often this was done before; also the random seed for the order of the arms
    """
    order = random.Random(generation)
    with contextlib.ExitStack() as stack:
        arms = [ArmProcess(spec, threads=plan.thread_count) for spec in specs]
        for arm in arms:
            stack.callback(arm.close)
        for arm in arms:
            facts = arm.answer()
            measured = found.setdefault(arm.name, Measured([], facts, []))
            measured.steps.append([])
            if specs[0].get("reference"):
                measured.reference.append([])
        for arm in arms:
            if plan.warmup:
                arm.turn(plan.warmup)
        for number in range(plan.rounds):
            names = specs[0]["arm"] if len(specs) == 1 else f"{len(specs)} arms"
            progress(f"{names}, process {generation + 1}/{plan.processes}, round {number + 1}/{plan.rounds}")
            for arm in order.sample(arms, len(arms)):
                # Run one extra step, because the first step of a turn is not counted.
                seconds, reference = arm.turn(plan.steps + 1)
                found[arm.name].steps[-1].append(seconds[1:])
                if reference:
                    found[arm.name].reference[-1].append(reference[1:])
        for arm in arms:
            found[arm.name].memories.append(arm.memory())
