"""`python -m benchmarks step`: compare our training step with those of other tools (`benchmarks.peers`).

Without other tools, our methods are compared with each other as in `oelm bench`: all of them are in memory
and take turns.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.peers import PEERS
from oelm.bench.harness import Progress, measure_alone
from oelm.bench.methods import MethodsBench, summarise
from oelm.bench.methods import run as compare_methods


def run(bench: MethodsBench, peers: tuple[str, ...] = PEERS, *, progress: Progress) -> dict[str, Any]:
    """Measure every method and peer tool, and return their step times as ratios to our baseline."""
    if not peers:
        return compare_methods(bench, progress)
    shared = {"build": "benchmarks.peers:build", **asdict(bench.workload)}
    specs = [*bench.specs(), *({"arm": peer, "peer": peer, **shared} for peer in peers)]
    return {
        "kind": "step",
        "order": "processes",
        "model": bench.workload.size,
        "settings": {**asdict(bench.workload), **asdict(bench.plan), "threads": bench.plan.thread_count},
        **summarise(measure_alone(specs, bench.plan, progress), "baseline"),
    }
