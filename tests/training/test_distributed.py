"""Two real processes under torchrun give one process' losses, and stop and resume like it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from oelm.errors import UsageError
from oelm.training.config import Config, Machine
from oelm.training.distributed import World, choose_device
from oelm.training.fit import fit
from oelm.training.folder import RunFolder, config_to_yaml

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
DRIVER = """
import json, sys, torch
from oelm.training.config import Machine
from oelm.training.fit import fit
from oelm.training.folder import config_from_yaml
torch.distributed.init_process_group("gloo")  # once for all runs
for yaml, folder, cache, limit in json.load(open(sys.argv[1])):
    machine = Machine(device="cpu", threads=1, cache_dir=cache, gemm_peak=False, time_limit=limit)
    fit(config_from_yaml(yaml), folder, machine)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, machine: Machine, make: Any) -> dict[str, RunFolder]:
    """All runs of two processes under one torchrun, since starting it costs more than the runs."""
    root = tmp_path_factory.mktemp("two")
    configs = two_process_configs(make)
    jobs = [(configs[name], name, limit) for name, limit in JOBS]
    (root / "driver.py").write_text(DRIVER)
    (root / "jobs.json").write_text(
        json.dumps([(config_to_yaml(c), str(root / n), machine.cache_dir, limit) for c, n, limit in jobs])
    )
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(root / "driver.py"), str(root / "jobs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: RunFolder(root / name) for name in configs}


# The last one is asked to stop after each of its first steps, then goes on.
JOBS = [("lm", 0.0), ("gpt-cls", 0.0), ("whole", 0.0), ("stopped", 1e-6), ("stopped", 1e-6), ("stopped", 0.0)]


def two_process_configs(make: Any) -> dict[str, Config]:
    """Accumulation, a schedule that thaws (other tensors to average), and rows that do not divide by two."""
    even = {"model": {"dropout": 0.0}, "data": {"train_rows": 37}}
    budget = {"accumulation": 2, "steps": 8, "log_every": 1}
    dropped = make("lm", model={"dropout": 0.1}, budget={"steps": 8, "log_every": 1})
    return {
        "lm": make("lm", "oelm-gradual", **even, budget=budget),
        "gpt-cls": make("gpt-cls", "oelm-gradual", **even, budget=budget),
        "whole": dropped,
        "stopped": dropped,
    }


def losses(folder: RunFolder, kind: str) -> list[float]:
    return [row["loss"] for row in folder.metrics(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["lm", "gpt-cls"])
def test_two_processes_give_the_losses_of_one(tmp_path, machine, make, runs, shape):
    assert fit(two_process_configs(make)[shape], tmp_path, machine).state == "finished"
    one, two = RunFolder(tmp_path), runs[shape]
    assert two.status().state == "finished"
    for kind in ("train", "validation"):
        assert losses(two, kind) == pytest.approx(losses(one, kind), rel=1e-4)
    assert two.results()["test"]["loss"] == pytest.approx(one.results()["test"]["loss"], rel=1e-4)
    assert two.results()["test"]["n"] == one.results()["test"]["n"]
    assert two.freeze_audit()["end"]["ok"]
    assert [row["step"] for row in two.metrics("train")] == list(range(1, 9))  # one writer


@pytest.mark.slow
def test_two_processes_stop_together_and_resume_exactly(runs):
    stopped, whole = runs["stopped"], runs["whole"]
    assert stopped.status().state == "finished"
    assert stopped.status().resumes == 2
    for name in ("metrics.jsonl", "results.json", "latest.pt"):
        assert (stopped.path / name).read_bytes() == (whole.path / name).read_bytes(), name


def test_one_process_alone_is_the_identity():
    with World("cpu") as world:
        assert world.main
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather("x") == ["x"]
        assert world.share(3) == [0, 1, 2]
        module = torch.nn.Linear(2, 2)
        assert world.wrap(module) is module


def test_devices_that_are_not_there():
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no CUDA device"):
            choose_device("cuda")
        assert choose_device("auto").type == "cpu"
