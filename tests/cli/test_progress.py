"""The progress of many runs, as `oelm run` and `oelm decide` show it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oelm.cli.progress import RunProgress
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import Job
from oelm.runs.progress import DecideProgress, write_decide_progress
from oelm.runs.schema import Status


def test_progress_tells_how_many_runs_and_hours_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots, 10 runs of 100 s: one has finished, two have 40 s and 60 s to go, seven wait."""
    clock = [1000.0]
    monkeypatch.setattr("oelm.cli.progress.time.monotonic", lambda: clock[0])
    etas = {"1": 40.0, "2": 60.0}
    monkeypatch.setattr(
        "oelm.cli.progress.state_of",
        lambda folder: ("running", Status(total_steps=10, eta_seconds=etas[folder.name]), ""),
    )
    jobs = [Job(experiment("GPT-01").at("smoke", seed), tmp_path / str(seed)) for seed in range(10)]
    progress = RunProgress(10)
    assert progress.left(jobs) == "10 runs left"
    for seed, state, now in (
        (0, "running", 0),
        (0, "finished", 100),
        (1, "running", 140),
        (2, "running", 160),
    ):
        clock[0] = 1000.0 + now
        jobs[seed].state = state
        progress.changed(jobs[seed])
    clock[0] = 1200.0
    assert progress.left(jobs) == "9 runs left, about 6 min 40 s"  # (40 + 60 + 7 x 100) / 2
    progress.last = 0.0
    progress.tick(jobs)
    assert "9 runs left, about 6 min 40 s" in capsys.readouterr().out.splitlines()[-1]


def test_the_time_left_is_in_proportion_to_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of 10 steps took 50 s; a run of 100 steps waits, and one of another experiment with 40."""
    clock = [0.0]
    monkeypatch.setattr("oelm.cli.progress.time.monotonic", lambda: clock[0])
    run = experiment("GPT-01").at("smoke", 0)
    run = replace(run, budget=replace(run.budget, steps=100))
    other = replace(run, id="GPT-04", budget=replace(run.budget, steps=40))
    trial = replace(run, tune=replace(run.tune, trial=True), budget=replace(run.budget, steps=10))
    jobs = [Job(config, tmp_path / str(i)) for i, config in enumerate((trial, run, other))]
    progress = RunProgress(0)
    for state, now in (("running", 1000.0), ("finished", 1050.0)):
        clock[0], jobs[0].state = now, state
        progress.changed(jobs[0])
    assert progress.left(jobs) == "2 runs left in this round, about 11 min 40 s"  # 500 s + 200 s


def test_runs_go_on_after_the_reader_of_a_pipe_has_gone() -> None:
    program = """
from oelm.cli.progress import RunProgress
progress = RunProgress(3)
for number in range(3000):
    progress.say(f"line {number}")
import sys
sys.exit(7)  # the exit code of the command
"""
    command = f"{shlex.join([sys.executable, '-c', program])} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "line 0\n", "")


def test_progress_tells_how_far_the_preparation_of_the_data_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Status(preparing="train 42%")
    monkeypatch.setattr("oelm.cli.progress.state_of", lambda folder: ("running", status, ""))
    progress = RunProgress(1)
    progress.last = -1000.0
    progress.tick([Job(experiment("GPT-01").at("smoke", 0), tmp_path, state="running")])
    assert "GPT-01 smoke seed 0 preparing data: train 42%" in capsys.readouterr().out


def test_progress_tells_how_far_tuning_and_the_questions_are(tmp_path: Path) -> None:
    config = experiment("GPT-01").at("smoke", 0)
    trial = replace(config, tune=replace(config.tune, trial=True))
    states = ((trial, "finished"), (trial, "running"), (trial, "pending"), (config, "pending"))
    jobs = [Job(c, tmp_path / str(i), state=state) for i, (c, state) in enumerate(states)]
    progress = RunProgress(0, studies=[tmp_path])
    now = "tuning: 1 of 3 trials ended; runs: 0 of 1 ended; 1 finished, 1 running, 2 pending"
    assert progress.stage(jobs).startswith(now)
    assert progress.left(jobs) == "2 trials and 1 run left in this round"
    fixed = RunProgress(1)  # the number of runs of `oelm run`; tuning may add trials
    for job in jobs[:3]:
        fixed.changed(replace(job, state="finished"))
    assert fixed.left(jobs[3:]) == "1 run left"
    write_decide_progress(tmp_path, DecideProgress(questions=4, decided=1, open=3))
    assert progress.stage(jobs).startswith(f"1 of 4 questions decided, 3 open; {now}")
