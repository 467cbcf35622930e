"""The state of runs as a person would judge it, from their folders."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.config.run_config import TuneConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.files.atomic import write_json
from oelm.runs.folder import RunFolder
from oelm.runs.lock import RunLock
from oelm.runs.scan import STALL_SECONDS, find_run, scan, tail
from oelm.runs.schema import Status

HERE = socket.gethostname()


def make(root: Path, seed: int = 0, **status: object) -> Path:
    """A run folder of GPT-01 whose status.json says `status`; without any, one that never started."""
    (job,) = make_jobs([experiment("GPT-01").at("smoke", seed)], root)
    if status:
        write_json(job.folder / "status.json", {**asdict(Status(heartbeat=time.time(), host=HERE)), **status})
    return job.folder


def state(root: Path) -> tuple[str, str]:
    (run,) = scan(root)
    return run.state, run.reason


def test_pending_finished_and_diverged(tmp_path: Path) -> None:
    make(tmp_path, 0)
    write_json(make(tmp_path, 1, state="finished") / "results.json", {})
    make(tmp_path, 2, state="diverged", reason="loss is nan at step 3")
    assert [(r.seed, r.state, r.reason) for r in scan(tmp_path)] == [
        (0, "pending", ""),
        (1, "finished", ""),
        (2, "diverged", "loss is nan at step 3"),
    ]


def test_a_run_without_results_has_not_finished(tmp_path: Path) -> None:
    make(tmp_path, state="finished")
    found, reason = state(tmp_path)
    assert found == "interrupted"
    assert "results.json is missing" in reason


def test_a_process_that_is_gone_makes_the_run_dead(tmp_path: Path) -> None:
    make(tmp_path, state="running", pid=2**22 + 12345)
    assert state(tmp_path)[0] == "dead"


def test_a_living_process_without_the_lock_is_another_one(tmp_path: Path) -> None:
    folder = make(tmp_path, state="running", pid=os.getpid())
    with RunLock(folder):
        assert state(tmp_path)[0] == "running"
    assert state(tmp_path)[0] == "dead"  # the pid lives, but what it holds is not this run


def test_a_living_process_without_heartbeat_is_stalled(tmp_path: Path) -> None:
    old = time.time() - STALL_SECONDS - 60
    folder = make(tmp_path, state="running", pid=os.getpid(), heartbeat=old)
    with RunLock(folder):
        found, reason = state(tmp_path)
    assert found == "stalled"
    assert "no heartbeat for 6 min" in reason


def test_another_hosts_run_is_believed_by_its_heartbeat(tmp_path: Path) -> None:
    make(tmp_path, 0, state="running", pid=1, host="elsewhere")
    assert state(tmp_path)[0] == "running"
    make(tmp_path, 0, state="running", pid=1, host="elsewhere", heartbeat=time.time() - 2 * STALL_SECONDS)
    assert state(tmp_path)[0] == "dead"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected a mapping"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"state": "finshed"}', "finshed"),
        (b'{"state": "finished", "step": "ten"}', "step: expected a whole number, got 'ten'"),
        (b'{"state": "finished", "loss": "low"}', "loss: expected a number, got 'low'"),
        (b'{"state": "finished", "metric": {"name": "ppl"}}', "metric"),
        (None, "directory"),
    ],
)
def test_a_broken_status_is_shown_not_raised(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = make(tmp_path) / "status.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    found, reason = state(tmp_path)
    assert found == "broken"
    assert said in reason
    assert main(["status", "--runs", str(tmp_path)]) == 0
    assert main(["monitor", "--once", "--runs", str(tmp_path)]) == 0


def test_trials_are_found_apart_from_the_runs(tmp_path: Path) -> None:
    config = experiment("GPT-01").at("smoke", 7)
    trials = [
        replace(config, seed=seed, optim=replace(config.optim, lr=lr), tune=TuneConfig(trial=True))
        for lr in (1e-3, 2e-3)
        for seed in (0, 1)
    ]
    make_jobs([config, *trials], tmp_path)
    assert len(scan(tmp_path)) == 5
    assert [r.name for r in scan(tmp_path, trials=False)] == ["GPT-01 smoke seed 7"]
    assert "GPT-01 smoke lr=0.002 seed 1" in {r.name for r in scan(tmp_path)}


def test_strangers_in_the_runs_folder_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".slurm" / "1").mkdir(parents=True)
    (tmp_path / "paper" / "GPT-01" / "scale=smoke" / "old").mkdir()
    assert len(scan(tmp_path)) == 1
    assert scan(tmp_path / "nowhere") == []


def test_a_seed_that_is_no_number_is_shown(tmp_path: Path) -> None:
    (tmp_path / "paper" / "GPT-01" / "scale=smoke" / "seed=x").mkdir(parents=True)
    found, reason = state(tmp_path)
    assert found == "broken"
    assert "'x' is not a seed" in reason


def test_only_the_tail_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "training.log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(log, 2) == ["line 99998", "line 99999"]
    assert len(tail(log, 10**9)) < 10_000
    assert tail(tmp_path / "none", 2) == []


def test_a_run_is_found_by_its_id_or_folder(tmp_path: Path) -> None:
    first = make(tmp_path, 0)
    assert find_run(tmp_path, "gpt-01") == first
    assert find_run(tmp_path, str(first)) == find_run(tmp_path, str(first), seed=0) == first
    with pytest.raises(UsageError, match="has scale smoke and seed 0"):
        find_run(tmp_path, str(first), seed=7)
    second = make(tmp_path, 1)
    with pytest.raises(UsageError, match="several runs match"):
        find_run(tmp_path, "GPT-01")
    assert find_run(tmp_path, "GPT-01", seed=1) == second
    with pytest.raises(UsageError, match="no run of this experiment matches"):
        find_run(tmp_path, "GPT-01", scale="full")
    with pytest.raises(UsageError, match="GPT-01"):
        find_run(tmp_path, "GPT-02")
    with pytest.raises(OelmError, match="not a run folder"):
        find_run(tmp_path, str(tmp_path))


def test_scanning_reads_one_small_file_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs, metrics and logs stay closed: hundreds of runs on a network disk are looked at every 2 s."""
    for seed in range(5):
        folder = RunFolder(make(tmp_path, seed, state="finished"))
        folder.metrics_file.write_text("{}\n" * 1000)
    opened: list[str] = []
    real = os.open

    def watched(path: str, *rest: int) -> int:
        opened.append(Path(path).name)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", watched)
    assert len(scan(tmp_path)) == 5
    assert opened == ["status.json"] * 5


def test_replace_keeps_a_status_writable(tmp_path: Path) -> None:
    folder = RunFolder(make(tmp_path, state="running", pid=os.getpid()))
    status = folder.status()
    assert status is not None
    folder.write_status(replace(status, state="failed", reason="disk full"))
    assert state(tmp_path) == ("failed", "disk full")
