"""A run on two nodes: two processes like those that `srun` starts, each with the ranks of its node."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oelm.config.overrides import override
from oelm.config.run_config import Machine
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.ranks import Nodes
from oelm.experiments.launch.worker import worker_command
from oelm.runs.folder import RunFolder

MACHINE = Machine(device="cpu", threads=1)
TASK = """
import sys
from oelm.config.run_config import Machine
from oelm.experiments.launch.slurm import SlurmTask
from oelm.experiments.launch.slurm_options import SlurmOptions
options = SlurmOptions(nodes=2, gpus_per_run=0, cpus=1)
sys.exit(SlurmTask(sys.argv[1], Machine(device="cpu", threads=1), options)())
"""


def claim(root: Path, steps: int = 4) -> RunFolder:
    config = override(experiment("GPT-02").at("smoke", 0), {"budget.steps": steps, "budget.eval_every": 2})
    return RunFolder(make_jobs([config], root)[0].folder)


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """Start the task of one node; gloo uses loopback, because a test machine may have no other network."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return subprocess.Popen(
        command,
        env={**os.environ, "GLOO_SOCKET_IFNAME": loopback, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_job_number() -> int:
    """A job number whose port (10000 + number) is free."""
    with socket.socket() as probe:
        for number in range(1000, 20_000, 7):
            try:
                probe.bind(("127.0.0.1", 10_000 + number))
                return number
            except OSError:
                continue
    raise AssertionError("no free port")


def test_two_nodes_train_one_run_and_only_the_first_writes_it(tmp_path: Path) -> None:
    folder = claim(tmp_path / "runs")
    number = str(free_job_number())
    common = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "localhost"}
    common |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    tasks = [
        start([sys.executable, "-c", TASK, str(folder.path)], SLURM_NODEID=n, SLURM_PROCID=n, **common)
        for n in "01"
    ]
    printed = [task.communicate(timeout=600)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], printed
    assert [attempt.exit_code for attempt in read_attempts(folder.path)] == [0]
    assert "2 processes" in folder.log_file.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_signal_to_the_first_node_stops_both_with_a_checkpoint(tmp_path: Path) -> None:
    folder = claim(tmp_path / "runs", steps=100_000)
    meet = f"localhost:{10_000 + free_job_number()}"
    commands = [
        worker_command(folder.path, MACHINE, "--processes", "1", *Nodes(2, n, meet).flags()) for n in (0, 1)
    ]
    nodes = [start(command) for command in commands]
    deadline = time.monotonic() + 600
    while not (status := folder.status()) or status.step < 2:
        assert time.monotonic() < deadline
        assert nodes[0].poll() is None, nodes[0].communicate()[0]
        time.sleep(0.1)
    nodes[0].send_signal(signal.SIGTERM)
    printed = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], printed
    status = folder.status()
    assert status is not None
    assert (status.state, folder.latest.exists()) == ("interrupted", True)


def test_one_node_never_meets_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "login.cluster")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "MASTER_ADDR" not in Nodes().environment()
    assert Nodes().flags() == []
    there = Nodes(2, 1, "node7:12345").environment()
    assert (there["MASTER_ADDR"], there["MASTER_PORT"]) == ("node7", "12345")
