"""Two real processes under torchrun give one process' losses, and stop and resume like it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oelm.errors import UsageError
from oelm.training.config import Config, Machine
from oelm.training.distributed import World, choose_device
from oelm.training.fit import fit
from oelm.training.folder import RunFolder, config_to_yaml

DRIVER = """
import sys
from oelm.training.config import Machine
from oelm.training.fit import fit
from oelm.training.folder import config_from_yaml
config = config_from_yaml(open(sys.argv[1]).read())
machine = Machine(device="cpu", threads=1, cache_dir=sys.argv[3], gemm_peak=False, time_limit=float(sys.argv[4]))
sys.exit(fit(config, sys.argv[2], machine).exit_code)
"""


def torchrun(config: Config, folder: Path, machine: Machine, limit: float = 0.0) -> None:
    folder.parent.mkdir(exist_ok=True)
    script, yaml = folder.parent / "driver.py", folder.parent / "config.yaml"
    script.write_text(DRIVER)
    yaml.write_text(config_to_yaml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(script), str(yaml), str(folder), machine.cache_dir, str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command + arguments, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert RunFolder(folder).status() is not None, done.stderr


def losses(folder: Path, kind: str) -> list[float]:
    return [row["loss"] for row in RunFolder(folder).metrics(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["lm", "gpt-cls"])
def test_two_processes_give_the_losses_of_one(tmp_path, machine, make, shape):
    """With accumulation, a thawing schedule (other tensors to average) and, for rows, a batch that is not even."""
    config = make(
        shape,
        "oelm-gradual",
        model={"dropout": 0.0},
        data={"train_rows": 37},
        budget={"accumulation": 2, "steps": 8, "log_every": 1},
    )
    assert fit(config, tmp_path / "one", machine).state == "finished"
    torchrun(config, tmp_path / "two" / "run", machine)
    two = RunFolder(tmp_path / "two" / "run")
    assert two.status().state == "finished", two.log_file.read_text()
    for kind in ("train", "validation"):
        assert losses(two.path, kind) == pytest.approx(losses(tmp_path / "one", kind), rel=1e-4)
    assert two.results()["test"]["loss"] == pytest.approx(
        RunFolder(tmp_path / "one").results()["test"]["loss"], rel=1e-4
    )
    assert two.freeze_audit()["end"]["ok"]
    steps = [row["step"] for row in two.metrics("train")]
    assert steps == list(range(1, 9))  # one writer


@pytest.mark.slow
def test_two_processes_stop_together_and_resume_exactly(tmp_path, machine, make):
    config = make("lm", model={"dropout": 0.1}, budget={"steps": 8, "log_every": 1})
    torchrun(config, tmp_path / "whole" / "run", machine)
    torchrun(config, tmp_path / "stopped" / "run", machine, limit=1e-6)
    stopped = RunFolder(tmp_path / "stopped" / "run")
    assert stopped.status().state == "interrupted"
    torchrun(config, stopped.path, machine)
    assert stopped.status().state == "finished"
    for name in ("metrics.jsonl", "results.json", "latest.pt"):
        assert (stopped.path / name).read_bytes() == (tmp_path / "whole" / "run" / name).read_bytes(), name


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
