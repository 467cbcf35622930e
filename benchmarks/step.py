"""`python -m benchmarks step`: compare our training step with those of other tools (`benchmarks.peers`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.peers import PEERS
from oelm.bench.harness import Progress, measure_alone, measure_together, ratio
from oelm.bench.methods import MethodsBench, summarise


def run(
    bench: MethodsBench, peers: tuple[str, ...] = PEERS, *, alone: bool = False, progress: Progress
) -> dict[str, Any]:
    """Measure every method and peer tool, and return their step times as ratios to our baseline.

    alone: also measure the baseline and each peer while no other arm is in memory, to check the harness
    """
    shared = {"build": "benchmarks.peers:build", **asdict(bench.workload)}
    specs = [*bench.specs(), *({"arm": peer, "peer": peer, **shared} for peer in peers)]
    found = summarise(measure_together(specs, bench.plan, progress), "baseline")
    if alone:
        compared = [spec for spec in specs if spec["arm"] in ("baseline", *peers)]
        single = measure_alone(compared, bench.plan, progress)
        found["alone"] = {
            name: {
                "median_seconds": arm.median_seconds,
                "ratio": ratio(arm.rounds, single["baseline"].rounds).to_dict(),
                **arm.to_dict(),
            }
            for name, arm in single.items()
        }
    return {
        "kind": "step",
        "interleaved": True,
        "model": bench.workload.size,
        "settings": {**asdict(bench.workload), **asdict(bench.plan), "threads": bench.plan.thread_count},
        **found,
    }
