"""Compare training regimes (settings) for scale `mini`: which one decides a question in the least CPU time?

The noise of a regime is the standard deviation of the difference in test loss between two arms with the same
seed. It is estimated from all arms and seeds together, after the mean of each arm and the mean of each seed
are subtracted from the losses. The number of seeds that a question needs is proportional to
(noise / effect)^2, so its CPU time is proportional to the square of
noise / effect x sqrt(CPU seconds of a run).
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.markdown import table
from oelm.config.overrides import override
from oelm.config.run_config import Machine, RunConfig
from oelm.errors import UsageError
from oelm.experiments.catalogue import experiment
from oelm.training.learner import Learner
from oelm.training.optimizer import clip_gradients, lr_factor, set_learning_rate
from oelm.training.parallel.world import World
from oelm.training.precision import Precision
from oelm.training.prepare import prepare
from oelm.training.tasks.task import Evaluation, evaluate

FP32 = Precision("fp32", "requested")
VALIDATIONS = 4  # per run
AVERAGED = (0.1, 0.3)  # average the weights over this last fraction of the steps, as alternatives


@dataclass(frozen=True)
class RegimeBench:
    """The regimes to compare, and the experiments and seeds to train in each of them."""

    regimes: tuple[str, ...]  # config changes of each regime, as "field=value,field=value"
    experiments: tuple[str, ...]  # IDs
    seeds: tuple[int, ...]
    data_dir: str
    record: str = ""  # JSON-lines file with one line per run; its runs are not repeated


def run(bench: RegimeBench, progress: Callable[[str], None]) -> dict[str, Any]:
    """Train the runs that the record does not contain; return the summary of each regime."""
    torch.set_num_threads(1)
    done = list(_recorded(bench.record))
    for seed in bench.seeds:
        for regime in bench.regimes:
            for id in bench.experiments:
                key = {"regime": regime, "id": id, "seed": seed}
                if any(key.items() <= row.items() for row in done):
                    continue
                row = {**key, **train(_config(id, regime, seed, bench.data_dir), bench.data_dir)}
                done.append(row)
                if bench.record:
                    with open(bench.record, "a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                progress(f"{regime} {id} seed {seed}: {row['cpu_seconds']:.0f} s, loss {row['test']}")
    wanted = [
        r
        for r in done
        if r["regime"] in bench.regimes and r["id"] in bench.experiments and r["seed"] in bench.seeds
    ]
    return {"kind": "regime", "rows": [_summary(name, wanted) for name in bench.regimes]}


def _recorded(path: str) -> Iterator[dict[str, Any]]:
    if path and Path(path).exists():
        yield from map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())


def _config(id: str, regime: str, seed: int, data_dir: str) -> RunConfig:
    pairs = [part.partition("=") for part in regime.split(",")]
    if not all(value for _, _, value in pairs):
        raise UsageError(f"'{regime}' is not a regime; write field=value,field=value")
    changes = {name: json.loads(value) if value[0].isdigit() else value for name, _, value in pairs}
    return override(experiment(id).at("mini", seed, data_dir), changes)


def train(config: RunConfig, data_dir: str) -> dict[str, Any]:
    """Train one run in this process; return its losses and the CPU seconds of training."""
    world, total = World("cpu"), config.budget.steps
    prepared = prepare(config, Machine(data_dir=data_dir, threads=1))
    learner = Learner(config, prepared, world, FP32)
    averages = {share: _Average(learner.model, round(total * (1 - share))) for share in AVERAGED}

    def score(model: nn.Module, split: str) -> Evaluation:
        return evaluate(prepared.task, model, split, rows=32, world=world, precision=FP32)

    cpu, curve = 0.0, []
    for step in range(total):
        begin = time.process_time()
        learner.follow_schedule(step, total)
        set_learning_rate(learner.optimizer, lr_factor(config.optim, step, total))
        batches = prepared.task.micro_batches(step, config.budget.batch_size)
        weight = sum(batch.weight for batch in batches)
        for batch in batches:
            (learner.objective(batch.tensors) / weight).backward()
        clip_gradients(learner.optimizer, config.optim.clip)
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        cpu += time.process_time() - begin
        for average in averages.values():
            average.update(learner.model, step)
        if (step + 1) % (total // VALIDATIONS) == 0:
            curve.append(score(learner.model, "validation").loss)
    last = score(learner.model, "test")
    test = {f"mean {share:g}": score(average.model, "test").loss for share, average in averages.items()}
    return {
        "test": {"last": last.loss, **test},
        "validation": curve,
        "cpu_seconds": round(cpu, 1),
    }


class _Average:
    """The mean of the weights over all steps from `first` on."""

    def __init__(self, model: nn.Module, first: int) -> None:
        self.model, self.first, self.count = copy.deepcopy(model), first, 0

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        if step < self.first:
            return
        self.count += 1
        for mean, new in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(new, 1 / self.count)


def _summary(regime: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return CPU time, losses and noise of one regime, for the last weights and for each averaged model."""
    here = [r for r in rows if r["regime"] == regime]
    ids = list(dict.fromkeys(r["id"] for r in here))
    seeds = sorted(set.intersection(*({r["seed"] for r in here if r["id"] == id} for id in ids)))
    held = {(r["id"], r["seed"]): r for r in here}
    weights = {}
    for name in here[0]["test"]:
        x = np.array([[held[id, seed]["test"][name] for seed in seeds] for id in ids])  # (arms, seeds)
        rest = x - x.mean(0) - x.mean(1, keepdims=True) + x.mean()
        freedom = max(1, (len(ids) - 1) * (len(seeds) - 1))
        weights[name] = {
            "losses": dict(zip(ids, x.mean(1).tolist(), strict=True)),
            "noise": float(np.sqrt(2 * (rest**2).sum() / freedom)),
        }
    cpu = float(np.mean([r["cpu_seconds"] for r in here]))
    return {"regime": regime, "seeds": seeds, "cpu_seconds": cpu, "weights": weights}


def lines(result: dict[str, Any]) -> list[str]:
    """Return the result as a Markdown table; the first experiment is the reference of the effects."""
    head = ("regime", "weights", "seeds", "CPU s", "loss", "effects", "noise", "noise / effect x sqrt(CPU s)")
    rows = []
    for row in result["rows"]:
        for name, found in row["weights"].items():
            loss, *others = found["losses"].values()
            effects = [other - loss for other in others]
            merits = [found["noise"] / abs(e) * row["cpu_seconds"] ** 0.5 for e in effects]
            cells = [row["regime"], name, str(len(row["seeds"])), f"{row['cpu_seconds']:.0f}", f"{loss:.3f}"]
            cells += [", ".join(f"{e:+.4f}" for e in effects), f"{found['noise']:.4f}"]
            cells += [", ".join(f"{m:.2f}" for m in merits)]
            rows.append(cells)
    return table(head, rows)
