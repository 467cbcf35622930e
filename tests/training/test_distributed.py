"""Two real processes under torchrun give one process' losses, and stop and resume like it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from oelm.config.run_config import Machine, RunConfig
from oelm.config.yaml import config_to_yaml
from oelm.errors import UsageError
from oelm.methods.audit import audit
from oelm.methods.saving.load import load
from oelm.runs.folder import RunFolder
from oelm.training.fit import fit
from oelm.training.parallel.world import World, choose_device, world_of

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
DRIVER = """
import json, os, sys, torch
import torch.distributed as dist
from oelm.config.run_config import Machine
from oelm.training.fit import fit
from oelm.config.yaml import config_from_yaml
from oelm.training.parallel.sharding import ShardedWorld

# How FSDP sends gradients, by the name it has in this version of torch.
sends = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
facts, place, send = {}, ShardedWorld.place, getattr(dist, sends)

def noted_place(world, model):
    place(world, model)
    facts.update(held=sum(p.to_local().numel() for p in model.parameters()), sent=0)

def noted_send(*, input, **named):
    facts["sent"] += input.numel()
    return send(input=input, **named)

ShardedWorld.place = noted_place
setattr(dist, sends, noted_send)
dist.init_process_group("gloo")  # once for all runs
for yaml, folder, cache, limit, shard in json.load(open(sys.argv[1])):
    machine = Machine(
        device="cpu", threads=1, cache_dir=cache, gemm_peak=False, time_limit=limit, shard=shard
    )
    fit(config_from_yaml(yaml), folder, machine)
    if shard:
        with open(f"{folder}/facts-{dist.get_rank()}.json", "w") as file:
            json.dump(facts, file)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, machine: Machine, make: Any) -> dict[str, RunFolder]:
    """All runs of two processes under one torchrun, since starting it costs more than the runs."""
    root = tmp_path_factory.mktemp("two")
    configs = two_process_configs(make)
    fit(configs["lm"], root / "sharded-later", replace(machine, time_limit=1e-6))
    jobs = []
    for name, limit in JOBS:
        shape, shard = name.removeprefix("sharded-"), name.startswith("sharded-")
        config = configs["lm" if shape in ("later", "before") else shape]
        jobs.append((config_to_yaml(config), str(root / name), machine.cache_dir, limit, shard))
    (root / "driver.py").write_text(DRIVER)
    (root / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(root / "driver.py"), str(root / "jobs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: RunFolder(root / name) for name, _ in JOBS}


# Those with a time limit are asked to stop after their first step, then go on.
STOPPED = [("stopped", 1e-6), ("stopped", 1e-6), ("stopped", 0.0)]
JOBS = [
    *[("lm", 0.0), ("gpt-cls", 0.0), ("whole", 0.0), *STOPPED],
    *[("sharded-lm", 0.0), ("sharded-bert", 0.0), ("sharded-whole", 0.0)],
    *[(f"sharded-{name}", limit) for name, limit in STOPPED],
    *[("sharded-later", 0.0), ("sharded-before", 1e-6)],  # begun by one process, to be ended by one
]


def two_process_configs(make: Any) -> dict[str, RunConfig]:
    """Accumulation, a schedule that thaws (other tensors to average), and rows that do not divide by two."""
    even = {"model": {"dropout": 0.0}, "data": {"train_rows": 37}}
    budget = {"accumulation": 2, "steps": 8, "log_every": 1}
    dropped = make("lm", model={"dropout": 0.1}, budget={"steps": 8, "log_every": 1})
    return {
        "lm": make("lm", "oelm-gradual", **even, budget=budget),
        "gpt-cls": make("gpt-cls", "oelm-gradual", **even, budget=budget),
        "bert": make("bert", "oelm-freeze", **even, budget=budget),
        "whole": dropped,
        "stopped": dropped,
    }


def losses(folder: RunFolder, kind: str) -> list[float]:
    return [row["loss"] for row in folder.metrics(kind)]


def must_agree(two: RunFolder, one: RunFolder) -> None:
    assert two.status().state == "finished"
    for kind in ("train", "validation"):
        assert losses(two, kind) == pytest.approx(losses(one, kind), rel=1e-4)
    assert two.results()["test"]["loss"] == pytest.approx(one.results()["test"]["loss"], rel=1e-4)
    assert two.results()["test"]["n"] == one.results()["test"]["n"]
    assert two.results()["parameters"] == one.results()["parameters"]
    assert two.freeze_audit()["end"]["ok"]
    assert [row["step"] for row in two.metrics("train")] == list(range(1, 9))  # one writer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm", "gpt-cls", "sharded-lm", "sharded-bert", "sharded-later"])
def test_two_processes_give_the_losses_of_one(tmp_path, machine, make, runs, name):
    shape = {"sharded-later": "lm"}.get(name, name.removeprefix("sharded-"))
    assert fit(two_process_configs(make)[shape], tmp_path, machine).state == "finished"
    must_agree(runs[name], RunFolder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "sharded-"])
def test_two_processes_stop_together_and_resume_exactly(runs, kind):
    stopped, whole = runs[f"{kind}stopped"], runs[f"{kind}whole"]
    assert stopped.status().state == "finished"
    assert stopped.status().resumes == 2
    for name in ("metrics.jsonl", "results.json", "latest.pt"):
        assert (stopped.path / name).read_bytes() == (whole.path / name).read_bytes(), name


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_divided(tmp_path, machine, make, runs):
    config = two_process_configs(make)["lm"]
    before = runs["sharded-before"]
    assert before.status().state == "interrupted"
    assert fit(config, before.path, machine).state == "finished"
    assert fit(config, tmp_path, machine).state == "finished"
    must_agree(before, RunFolder(tmp_path))


@pytest.mark.slow
def test_a_divided_network_is_held_in_halves_and_saved_whole(runs):
    run = runs["sharded-whole"]
    counts = run.results()["parameters"]
    assert counts["frozen"] > 0
    for rank in range(2):
        facts = json.loads((run.path / f"facts-{rank}.json").read_text())
        assert facts["held"] / counts["total"] == pytest.approx(0.5, abs=0.01)
        assert facts["sent"] == 8 * counts["trainable"]  # 8 steps: nothing of what is frozen
    best = load(run.best)
    assert type(best).__name__ == "GPT"
    assert sum(p.numel() for p in best.parameters()) == counts["total"]
    assert audit(best).ok


TIGHT = """
import os, sys, torch
from oelm.config.run_config import Machine
from oelm.training.fit import fit
from oelm.config.yaml import config_from_yaml
from oelm.training.tasks.lm import LanguageModelling

loss = LanguageModelling.loss

def tight(task, model, tensors):
    if os.environ["RANK"] == "1" and len(tensors["ids"]) > 1 and model.training:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return loss(task, model, tensors)

LanguageModelling.loss = tight
machine = Machine(device="cpu", threads=1, cache_dir=sys.argv[3], gemm_peak=False)
sys.exit(fit(config_from_yaml(open(sys.argv[1]).read()), sys.argv[2], machine).exit_code)
"""


@pytest.mark.slow
def test_memory_that_one_of_two_processes_lacks_is_asked_for_anew(tmp_path, machine, make):
    """The other waits for gradients that never come: both end, and the next start takes smaller parts."""
    config = make("lm", model={"dropout": 0.0}, budget={"batch_size": 8, "steps": 8, "log_every": 1})
    assert fit(config, tmp_path / "roomy", machine).state == "finished"
    (tmp_path / "tight.py").write_text(TIGHT)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    folder = RunFolder(tmp_path / "tight")
    reasons = []
    while not reasons or folder.status().state == "interrupted":
        arguments = (tmp_path / "tight.py", tmp_path / "config.yaml", folder.path, machine.cache_dir)
        done = subprocess.run(
            [*TORCHRUN, "--nproc-per-node=2", *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=120,
            check=False,
        )
        assert folder.status() is not None, done.stderr
        reasons.append(folder.status().reason)
        assert len(reasons) <= 3
    assert [reason[:44] for reason in reasons] == [
        "out of memory with micro-batches of 8 rows o",
        "out of memory with micro-batches of 4 rows o",
        "",
    ]
    assert "micro-batches now have 2 rows" in folder.log_file.read_text()
    must_agree(folder, RunFolder(tmp_path / "roomy"))


def test_one_process_alone_is_the_identity():
    with World("cpu") as world:
        assert world.main
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather({"x": torch.tensor([1])}) == [{"x": torch.tensor([1])}]
        assert world.share(3) == [0, 1, 2]
        assert list(world.deal("ab")) == [("a", True), ("b", True)]
        module = torch.nn.Linear(2, 2)
        assert world.wrap(module) is module


def test_ddp_lets_go_of_the_process_group_before_it_is_destroyed(tmp_path, monkeypatch):
    """Were the reducer freed last, it would join gloo's thread while it holds the GIL: a deadlock."""
    monkeypatch.setenv("OELM_RANK_DIR", str(tmp_path))
    world = World("cpu")
    seen = []
    destroy = torch.distributed.destroy_process_group

    def noted_destroy():
        seen.append((module.reducer, module.logger, module.process_group))
        destroy()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", noted_destroy)
    world._init_process_group("gloo")  # of one rank: the class itself opens none for fewer than two
    world.size, world._joined = 2, True
    module = world.wrap(torch.nn.Linear(2, 2))  # kept alive, as by a traceback
    world.__exit__()
    assert seen == [(None, None, None)]
    assert not torch.distributed.is_initialized()


def test_one_process_divides_nothing():
    with pytest.raises(UsageError, match="this run has only one"):
        world_of(Machine(device="cpu", shard=True))


def test_a_divided_network_is_not_compiled(tmp_path, machine, make, monkeypatch):
    monkeypatch.setattr("oelm.training.fit.world_of", lambda machine: World(machine.device))
    with pytest.raises(UsageError, match="compile=false"):
        fit(replace(make(), compile=True), tmp_path, replace(machine, shard=True))


def test_the_last_round_is_filled_up(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert list(World("cpu").deal("abcde")) == [("b", True), ("d", True), ("e", False)]


def test_devices_that_are_not_there():
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no CUDA device"):
            choose_device("cuda")
        assert choose_device("auto").type == "cpu"
