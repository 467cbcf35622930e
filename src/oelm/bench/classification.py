"""`oelm bench classification`: samples per second of our loop, of padding to 512, and of the Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from oelm.bench.classification_arms import ARMS, OURS, PADDED, model_name
from oelm.bench.interleave import interleave, ratio, require_rounds
from oelm.bench.results import load, record
from oelm.errors import UsageError, unknown_name

DATASETS = ("agnews", "mnli", "imdb")


@dataclass(frozen=True)
class ClassificationBench:
    """One interleaved comparison per dataset."""

    datasets: tuple[str, ...] = DATASETS
    arms: tuple[str, ...] = ARMS
    model: str = ""  # "" = MiniLM if installed
    rows: int = 32  # per optimizer step
    steps: int = 6  # optimizer steps per round; one where every row is padded, as all such steps are alike
    rounds: int = 8
    warmup: int = 1
    dropout: float = 0.1
    train_rows: int = 0  # 0 = the whole split
    threads: int = 0  # 0 = all cores
    data_dir: str = ""  # "" = built-in stand-ins
    cache_dir: str = ""

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise unknown_name("arm", arm, ARMS)
        if self.arms[:1] != (OURS,):
            raise UsageError(f"the first arm is '{OURS}': it is what the others are compared with")
        require_rounds(self.rounds)

    def specs(self, dataset: str) -> list[dict[str, Any]]:
        shared = {**asdict(self), "kind": "classification", "dataset": dataset, "seed": 0}
        shared["model"] = self.model or model_name()
        del shared["datasets"], shared["arms"]
        return [{**shared, "arm": arm, "steps": 1 if arm == PADDED else self.steps} for arm in self.arms]


def run(bench: ClassificationBench, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    before, threads = load(), bench.threads or os.cpu_count() or 1
    found = []
    for dataset in bench.datasets:
        measured = interleave(
            bench.specs(dataset),
            rounds=bench.rounds,
            warmup=bench.warmup,
            threads=threads,
            progress=lambda text, name=dataset: progress(f"{name}: {text}"),  # type: ignore[misc]
        )
        found.append({"dataset": dataset, **summarise(measured, bench.arms)})
    settings = {**asdict(bench), "threads": threads, "precision": "fp32", "max_length": 512}
    del settings["data_dir"], settings["cache_dir"]  # places on a disk say nothing; `origin` does
    settings["model"] = bench.model or model_name()
    return record("classification", before, interleaved=True, settings=settings, comparisons=found)


def summarise(measured: dict[str, dict[str, Any]], arms: tuple[str, ...]) -> dict[str, Any]:
    """Samples per second of each arm, and how many times those of each other arm ours has."""
    ours = measured[arms[0]]
    per_sample, per_sample_cpu = (
        {name: [s / measured[name]["facts"]["samples"] for s in measured[name][clock]] for name in arms}
        for clock in ("seconds", "cpu_seconds")
    )
    rows = []
    for name in arms:
        arm, facts = measured[name], measured[name]["facts"]
        series = per_sample[name]
        rows.append(
            {
                "name": name,
                "samples_per_second": len(series) / sum(series),
                "speedup_of_ours": ratio(series, per_sample[arms[0]], of="mean").to_dict(),
                "speedup_of_ours_cpu": ratio(
                    per_sample_cpu[name], per_sample_cpu[arms[0]], of="mean"
                ).to_dict(),
                "samples": facts["samples"] * len(series),
                "tokens_per_sample": facts["tokens_per_sample"],
                "padding_share": facts["padding_share"],
                "memory": arm["memory"],
                "seconds": arm["seconds"],
                "cpu_seconds": arm["cpu_seconds"],
            }
        )
    return {"origin": ours["facts"]["origin"], "arms": rows}
