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
from oelm.experiments.launch.jobs import Job, make_jobs
from oelm.experiments.launch.ranks import Nodes
from oelm.experiments.launch.slurm import SlurmLauncher
from oelm.experiments.launch.slurm_options import SlurmOptions
from oelm.experiments.launch.worker import worker_command
from oelm.runs.folder import RunFolder

MACHINE = Machine(device="cpu", threads=1)
# Stands for `sbatch`: keeps the script, and answers with the number of the job.
SBATCH = """#!/bin/sh
cp "$1" "$0.script"
echo "Submitted batch job {number}"
"""
# Stands for `srun` in a job of two nodes: starts the command of the script once per node.
SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[sys.argv.index(sys.executable):]
nodes = [{{**os.environ, "SLURM_NODEID": n, "SLURM_PROCID": n, "SLURM_LOCALID": "0"}} for n in "01"]
tasks = [subprocess.Popen(command, env=environment) for environment in nodes]
sys.exit(max(task.wait() for task in tasks))
"""


def claim(root: Path, steps: int = 4) -> Job:
    config = override(experiment("GPT-02").at("smoke", 0), {"budget.steps": steps, "budget.eval_every": 2})
    return make_jobs([config], root)[0]


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


def test_two_nodes_train_one_run_through_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number, programs = free_job_number(), tmp_path / "programs"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        (programs / name).write_text(text.format(number=number, python=sys.executable), encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    root = tmp_path / "runs"
    job = claim(root)
    options = SlurmOptions(nodes=2, gpus_per_run=0, cpus=1)
    SlurmLauncher(root, options, MACHINE, wait=False).launch([job])
    of_the_job = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "localhost"}
    counts = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    script = start(["bash", str(programs / "sbatch.script")], **of_the_job, **counts)
    printed, _ = script.communicate(timeout=600)
    assert script.returncode == 0, printed
    assert [attempt.exit_code for attempt in read_attempts(job.folder)] == [0]  # only the first node writes
    assert "2 processes" in RunFolder(job.folder).log_file.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_signal_to_the_first_node_stops_both_with_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(claim(tmp_path / "runs", steps=100_000).folder)
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
