"""`oelm bench step`: whole optimizer steps of several arms, interleaved, with memory and FLOPs beside."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oelm.bench.arms import COMPILED, ENCODERS, GEMM, PEERS
from oelm.bench.interleave import interleave, ratio, require_rounds
from oelm.bench.results import load, record
from oelm.errors import UsageError, unknown_name
from oelm.methods.presets import ALIASES, method, methods

DEFAULT_ARMS = ("baseline", "oelm-freeze", "plain", "transformers", "trainer")


@dataclass(frozen=True)
class StepBench:
    """One interleaved comparison. The first arm is the one that all others are measured against."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    size: str = "medium-512"
    vocabulary: int = 50257
    context: int = 512
    batch: int = 4
    position: str = "learned"
    shape: dict[str, int] = field(default_factory=dict)  # fields of the GPT that differ from its size's
    rounds: int = 12
    warmup: int = 2
    threads: int = 0  # 0 = all cores

    def __post_init__(self) -> None:
        if len(set(self.arms)) != len(self.arms) or not self.arms:
            raise UsageError(f"a benchmark needs different arms, not {list(self.arms)}")
        for arm in self.arms:
            if arm.removesuffix(COMPILED) not in (*methods(), *ALIASES) and arm not in PEERS:
                raise unknown_name("arm", arm, [*methods(), *PEERS])
            if arm in PEERS and (self.size in ENCODERS or self.position != "learned" or self.shape):
                raise UsageError(f"the peer '{arm}' is a plain GPT-2 of a named size with learned positions")
        require_rounds(self.rounds)

    def specs(self) -> list[dict[str, Any]]:
        shared = {
            "kind": "step",
            "size": self.size,
            "vocabulary": self.vocabulary,
            "context": self.context,
            "batch": self.batch,
            "position": self.position,
            "shape": self.shape,
            "seed": 0,
        }
        specs: list[dict[str, Any]] = [{"kind": "step", "arm": GEMM}]
        specs += [{"arm": arm, "method": arm.removesuffix(COMPILED), **shared} for arm in self.arms]
        return specs


def run(bench: StepBench, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure; the result is what goes into benchmarks/results."""
    before, threads = load(), bench.threads or os.cpu_count() or 1
    measured = interleave(
        bench.specs(), rounds=bench.rounds, warmup=bench.warmup, threads=threads, progress=progress
    )
    return record(
        "step",
        before,
        interleaved=True,
        model=bench.size,
        settings={**asdict(bench), "threads": threads, "precision": "fp32", "dropout": 0.0},
        **summarise(measured, bench.arms),
    )


def summarise(measured: dict[str, dict[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Ratios to the first arm, share of the GEMM peak, bytes: from the raw seconds of the rounds."""
    gemm = measured[GEMM]
    peak = gemm["facts"]["flops"] / statistics.median(gemm["seconds"])
    first = measured[arms[0]]
    rows = []
    for name in arms:
        arm = measured[name]
        facts, seconds = arm["facts"], statistics.median(arm["seconds"])
        ours = name not in PEERS and not name.endswith(COMPILED)  # what a run of that method takes
        row: dict[str, Any] = {
            "name": name,
            "method": name if ours else "",
            "fields": method(name).to_dict() if ours else None,  # a name can change its meaning
            "median_seconds": seconds,
            "tokens_per_second": facts["tokens"] / seconds,
            "ratio": ratio(arm["seconds"], first["seconds"]).to_dict(),
            "cpu_ratio": ratio(arm["cpu_seconds"], first["cpu_seconds"]).to_dict(),
            "memory": arm["memory"],
            "memory_ratio": arm["memory"]["peak_bytes"] / first["memory"]["peak_bytes"],
            "parameters": facts["parameters"],
            "trainable": facts["trainable"],
            "seconds": arm["seconds"],
            "cpu_seconds": arm["cpu_seconds"],
        }
        if "flops" in facts:
            row["flops_per_step"] = facts["flops"]
            row["gemm_peak_share"] = facts["flops"] / seconds / peak
            if "flops" in first["facts"] and name.endswith(COMPILED) == arms[0].endswith(COMPILED):
                row["flops_ratio"] = facts["flops"] / first["facts"]["flops"]
                row["saving"] = saving(row["ratio"], row["flops_ratio"])
        rows.append(row)
    return {"gemm_peak_flops": peak, "gemm_seconds": gemm["seconds"], "arms": rows}


def saving(measured: dict[str, float], flops_ratio: float) -> dict[str, float] | None:
    """What the FLOP model promises and what the clock shows, as shares of the first arm's step."""
    promised = 1 - flops_ratio
    if promised <= 0:
        return None
    return {
        "predicted": promised,
        "measured": 1 - measured["value"],
        "low": 1 - measured["high"],
        "high": 1 - measured["low"],
        "realised": (1 - measured["value"]) / promised,
    }
