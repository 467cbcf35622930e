"""`python -m benchmarks kernels`: compare training steps with and without our C++ code.

The C++ code (`oelm.compiled`) computes attention, GELU and cross-entropy, and on some CPUs matrix products;
there, a third arm leaves the products to torch. The arms train copies of the same GPT in one process, with
the same number of threads. They take turns of several steps, in an order that alternates between rounds; the
first step of a turn is not counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from oelm import compiled
from oelm.bench.harness import Progress, ratio
from oelm.bench.methods import Workload, build
from oelm.compiled import products
from oelm.cores import usable_cores
from oelm.errors import UsageError
from oelm.methods.presets import find_method
from oelm.training.measure.flops import gemm_peak
from oelm.units import counted

OURS, TORCHS_PRODUCTS, TORCH = "C++", "C++ with torch's products", "torch"


@dataclass(frozen=True)
class Case:
    """A model and its batch, and the threads that train it; 0 = one per core."""

    workload: Workload
    threads: int = 1


CASES = (
    Case(Workload("tiny", vocabulary=257, context=64, batch=16, position="rope")),
    Case(Workload("mini", vocabulary=1024, context=128, batch=4, position="rope")),
    Case(Workload("medium-512", vocabulary=1024, context=128, batch=4, position="rope")),
    Case(Workload("medium-512"), threads=0),
)


@dataclass(frozen=True)
class KernelsBench:
    cases: tuple[Case, ...] = CASES
    rounds: int = 20
    steps: int = 8  # counted steps per turn

    def __post_init__(self) -> None:
        if self.rounds < 2 or self.steps < 1:
            raise UsageError(
                f"a confidence interval needs at least 2 rounds of 1 step, not {self.rounds} of {self.steps}"
            )


def run(bench: KernelsBench, progress: Progress) -> dict[str, Any]:
    if compiled.library() is None:
        raise UsageError(
            "the C++ code is not installed; install a C++ compiler, then oelm again (pip install -e .)"
        )
    models = []
    for case in bench.cases:
        threads = case.threads or usable_cores()
        with thread_count(threads):
            models.append({"threads": threads, **compare(case.workload, bench)})
        progress(f"{case.workload.size}, {counted(threads, 'thread')}: measured")
    settings = {"rounds": bench.rounds, "steps": bench.steps}
    return {"kind": "kernels", "settings": settings, "models": models, "gemm_peaks": gemm_peaks()}


def gemm_peaks() -> dict[str, float]:
    """Return the FLOP/s of large matrix products on one thread: of torch, and of our own if there are any."""
    peaks = {}
    with thread_count(1):
        for arm in (OURS, TORCH) if products.available() else (TORCH,):
            with kernels_of(arm):
                peaks[arm] = gemm_peak(torch.device("cpu"))
    return peaks


def compare(work: Workload, bench: KernelsBench) -> dict[str, Any]:
    """Return the step times of all arms for one model, and the ratios of our arm to the others."""
    spec = {**asdict(work), "arm": "", "method": find_method("baseline").to_dict()}
    order = [OURS, TORCHS_PRODUCTS, TORCH] if products.available() else [OURS, TORCH]
    steps: dict[str, Callable[[], None]] = {arm: build(spec).step for arm in order}
    seconds: dict[str, list[list[float]]] = {arm: [] for arm in steps}
    for _ in range(bench.rounds):
        for arm in order:
            with kernels_of(arm):
                seconds[arm].append([seconds_of(steps[arm]) for _ in range(1 + bench.steps)][1:])
        order.reverse()
    # Each round is passed to `ratio()` as one process.
    medians = {arm: [[float(np.median(turn))] for turn in turns] for arm, turns in seconds.items()}
    return {
        "workload": asdict(work),
        "median_seconds": {arm: float(np.median(turns)) for arm, turns in seconds.items()},
        "ratios": {arm: ratio(medians[OURS], medians[arm]).to_dict() for arm in steps if arm != OURS},
        "seconds": seconds,
    }


def seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@contextlib.contextmanager
def kernels_of(arm: str) -> Iterator[None]:
    """Use the C++ code of this arm, and no other, in the `with` block."""
    library, available = compiled.library, products.available
    if arm == TORCH:
        compiled.library = lambda: None
    if arm != OURS:
        products.available = lambda: False
    try:
        yield
    finally:
        compiled.library, products.available = library, available


@contextlib.contextmanager
def thread_count(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
