"""`oelm bench growth`: how step time and memory grow with context, width, depth and vocabulary.

One axis at a time is stretched from a small GPT; its points are arms of one interleaved run. A line through
the logarithms gives the exponent: 1 means that twice the size takes twice the time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from oelm.bench.interleave import interleave
from oelm.bench.results import load, record
from oelm.errors import UsageError, unknown_name

AXES: dict[str, tuple[int, ...]] = {
    "context": (128, 256, 512, 1024, 2048),
    "width": (128, 256, 512, 1024),
    "depth": (2, 4, 8, 16),
    "vocabulary": (2048, 8192, 32768, 65536),
}
_HEAD = 64  # size of a head at every width


@dataclass(frozen=True)
class GrowthBench:
    """The point that each axis is stretched from, and how it is measured."""

    method: str = "baseline"
    axes: tuple[str, ...] = tuple(AXES)
    context: int = 256
    width: int = 256
    depth: int = 4
    vocabulary: int = 8192
    batch: int = 2
    shrink: int = 1  # divide every value by this, for a quick try
    rounds: int = 5
    warmup: int = 1
    threads: int = 0

    def __post_init__(self) -> None:
        for axis in self.axes:
            if axis not in AXES:
                raise unknown_name("axis", axis, AXES)
        if self.rounds < 3:
            raise UsageError("a median needs at least 3 rounds")

    def values(self, axis: str) -> list[int]:
        return sorted({max(1, value // self.shrink) for value in AXES[axis]})

    def spec(self, axis: str, value: int) -> dict[str, Any]:
        at = {name: max(1, getattr(self, name) // self.shrink) for name in AXES} | {axis: value}
        width = at["width"]
        shape = {"width": width, "layers": at["depth"], "heads": max(1, width // _HEAD), "ff": 4 * width}
        return {
            "kind": "step",
            "arm": f"{axis}={value}",
            "method": self.method,
            "size": "mini",
            "shape": shape,
            "vocabulary": at["vocabulary"],
            "context": at["context"],
            "batch": self.batch,
            "seed": 0,
        }


def run(bench: GrowthBench, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    before, threads = load(), bench.threads or os.cpu_count() or 1
    axes = {}
    for axis in bench.axes:
        values = bench.values(axis)
        measured = interleave(
            [bench.spec(axis, value) for value in values],
            rounds=bench.rounds,
            warmup=bench.warmup,
            threads=threads,
            progress=progress,
        )
        axes[axis] = summarise(values, [measured[f"{axis}={value}"] for value in values])
    return record("growth", before, settings={**asdict(bench), "threads": threads}, axes=axes)


def summarise(values: Sequence[int], points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [statistics.median(point["seconds"]) for point in points]
    flops = [point["facts"]["flops"] for point in points]
    # What the network takes, without the interpreter and its libraries.
    memory = [point["memory"]["peak_bytes"] - point["memory"]["start_bytes"] for point in points]
    return {
        "values": list(values),
        "median_seconds": seconds,
        "flops": flops,
        "memory_bytes": memory,
        "seconds": [point["seconds"] for point in points],
        "exponents": {
            "seconds": exponent(values, seconds),
            "flops": exponent(values, flops),
            "memory": exponent(values, memory),
        },
    }


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x by least squares: y is about x to this power.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
