"""Launchers that are killed, compete for runs and get broken experiments; training is a stub (see stub/)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oelm.config.run_config import Machine, QuestionConfig, RunConfig
from oelm.errors import UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.attempts import read_attempts
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.local import LocalLauncher
from oelm.runs.scan import scan
from oelm.runs.states import EXIT_FAILED, EXIT_PERMANENT, EXIT_USAGE
from run_factory import lm_config, write_run
from waiting import wait_until

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., tuple[int, str]]
GOOD = ("GOOD-1", "GOOD-2", "GOOD-3")


def results(root: Path) -> dict[str, object]:
    return {
        str(p.relative_to(root)): json.loads(p.read_text(encoding="utf-8"))
        for p in sorted(root.rglob("results.json"))
    }


def steps_of(root: Path) -> dict[str, int]:
    return {run.name: run.status.step for run in scan(root) if run.status}


def no_run_had_two_workers(root: Path) -> bool:
    return not list(root.rglob("TWO AT ONCE"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def uninterrupted(run_oelm: Run, root: Path, tmp_path: Path) -> dict[str, object]:
    """The results of the same runs without any interruption."""
    code, output = run_oelm(*GOOD, "--seeds", "0", "1")
    assert code == 0, output
    found = results(root)
    root.rename(tmp_path / "undisturbed")
    assert len(found) == 6
    return found


def test_questions_must_not_change_for_further_seeds(tmp_path: Path) -> None:
    def asks(seed: int, margin: float) -> RunConfig:
        config = lm_config("GPT-02", "oelm-freeze", seed=seed)
        asked = (QuestionConfig("GPT-01", margin=margin),)
        return replace(config, compare=replace(config.compare, questions=asked))

    write_run(tmp_path, asks(0, 0.01))
    make_jobs([asks(1, 0.01)], tmp_path)
    with pytest.raises(UsageError, match="the questions about GPT-02 differ"):
        make_jobs([asks(2, 0.2)], tmp_path)


def test_new_seeds_must_not_come_before_those_of_decide(tmp_path: Path) -> None:
    config = lm_config(seed=42)
    write_run(tmp_path, replace(config, compare=replace(config.compare, max_seeds=12)))
    make_jobs([lm_config(seed=seed) for seed in (42, 43)], tmp_path)
    with pytest.raises(UsageError, match=r"seed 0 of GPT-01 is new, .* Use seeds above 43"):
        make_jobs([lm_config(seed=seed) for seed in (0, 44)], tmp_path)


def test_finished_runs_are_skipped_the_second_time(run_oelm: Run, root: Path) -> None:
    for _ in range(2):
        code, output = run_oelm("GOOD-1")
        assert code == 0, output
    (starts,) = root.rglob("starts")
    assert len(starts.read_text(encoding="utf-8").splitlines()) == 1


def test_a_killed_launcher_is_replaced_by_the_same_command(
    start_oelm: Start, root: Path, uninterrupted: dict[str, object]
) -> None:
    words = (*GOOD, "--seeds", "0", "1", "--slots", "2")
    first = start_oelm(*words)
    wait_until(lambda: any(step > 2 for step in steps_of(root).values()))
    os.kill(first.pid, signal.SIGKILL)
    first.wait(timeout=300)
    second = start_oelm(*words)
    output = second.communicate(timeout=300)[0]
    assert second.returncode == 0, output
    assert results(root) == uninterrupted
    assert no_run_had_two_workers(root)


def test_a_killed_worker_is_restarted_from_its_checkpoint(
    start_oelm: Start, root: Path, uninterrupted: dict[str, object]
) -> None:
    process = start_oelm(*GOOD, "--seeds", "0", "1", "--slots", "2")
    wait_until(lambda: any(step > 2 for step in steps_of(root).values()))
    victim = next(run for run in scan(root) if run.state == "running" and run.status and run.status.step > 0)
    assert victim.status is not None
    os.kill(victim.status.pid, signal.SIGKILL)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert results(root) == uninterrupted
    assert read_attempts(victim.path)[0].reason == "killed by SIGKILL"


def test_a_worker_killed_after_its_run_finished_counts_as_finished(start_oelm: Start, root: Path) -> None:
    process = start_oelm("KILLED-1", "--retries", "0", STUB_STEP_SECONDS="0")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    (run,) = scan(root)
    assert run.state == "finished"
    assert [a.reason for a in read_attempts(run.path)] == ["killed by SIGKILL"]


def test_the_end_of_a_session_stops_the_runs_with_a_checkpoint(start_oelm: Start, root: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    process = start_oelm("GOOD-1", STUB_STEP_SECONDS="0.5")
    signal.signal(signal.SIGHUP, before)
    wait_until(lambda: any(step > 0 for step in steps_of(root).values()))
    os.kill(process.pid, signal.SIGHUP)
    output = process.communicate()[0]
    assert process.returncode == 75, output
    assert {run.state for run in scan(root)} == {"interrupted"}


def test_ctrl_c_leaves_a_state_that_the_same_command_continues(
    start_oelm: Start, root: Path, uninterrupted: dict[str, object]
) -> None:
    words = (*GOOD, "--seeds", "0", "1", "--slots", "2")
    first = start_oelm(*words)
    wait_until(lambda: any(step > 2 for step in steps_of(root).values()))
    os.kill(first.pid, signal.SIGINT)
    output = first.communicate(timeout=300)[0]
    assert first.returncode == 75, output
    assert "the same command resumes" in output
    states = {run.state for run in scan(root)}
    assert states <= {"interrupted", "pending", "finished"}, states
    second = start_oelm(*words)
    output = second.communicate(timeout=300)[0]
    assert second.returncode == 0, output
    assert results(root) == uninterrupted


def test_two_launchers_never_run_the_same_run_twice(
    start_oelm: Start, root: Path, uninterrupted: dict[str, object]
) -> None:
    words = (*GOOD, "--seeds", "0", "1", "--slots", "2")
    processes = [start_oelm(*words) for _ in range(3)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert results(root) == uninterrupted
    assert no_run_had_two_workers(root)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) == 1 for path in root.rglob("starts"))


def test_a_broken_experiment_does_not_stop_the_good_ones(run_oelm: Run, root: Path) -> None:
    code, output = run_oelm("BROKEN-1", "CRASHES-1", "DIVERGES-1", *GOOD, "--retries", "1")
    assert code == 1, output
    states = {run.id: run.state for run in scan(root)}
    assert states == {
        "BROKEN-1": "failed",
        "CRASHES-1": "failed",
        "DIVERGES-1": "diverged",
        **dict.fromkeys(GOOD, "finished"),
    }
    reasons = {run.id: [a.reason for a in read_attempts(run.path)] for run in scan(root)}
    assert reasons["BROKEN-1"] == ["label -1 in row 7"]  # bad data: not retried
    assert reasons["CRASHES-1"] == ["RuntimeError: device lost"] * 2
    assert "label -1 in row 7" in output
    assert "loss is nan at step 1" in output


def test_a_temporary_failure_is_retried_and_its_reason_kept(start_oelm: Start, root: Path) -> None:
    process = start_oelm("FLAKY-1", STUB_STEP_SECONDS="0")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    (run,) = scan(root)
    assert [a.reason for a in read_attempts(run.path)] == ["RuntimeError: the network went away", ""]
    said = [line.split()[1] for line in output.splitlines() if "the network went away" in line]
    assert said == ["again"]  # and not repeated for the second attempt


def test_a_folder_with_another_config_is_refused_with_the_difference(run_oelm: Run, root: Path) -> None:
    run_oelm("GOOD-1")
    code, output = run_oelm("GOOD-1", "--set", "optim.lr=0.5")
    assert code == 2
    assert "optim.lr" in output
    assert "Traceback" not in output


def test_tuning_gives_every_arm_the_same_grid_and_runs_the_best_learning_rate(
    run_oelm: Run, root: Path
) -> None:
    words = ("TUNED-1", "TUNED-2", "--seeds", "3", "4")
    code, output = run_oelm(*words)
    assert code == 0, output  # a trial that diverges is not a failure
    assert "diverged" in output
    runs = [run for run in scan(root) if not run.trial]
    assert {(run.id, run.seed, run.state) for run in runs} == {
        (id, seed, "finished") for id in ("TUNED-1", "TUNED-2") for seed in (3, 4)
    }
    for found in runs:
        assert json.loads((found.path / "results.json").read_text(encoding="utf-8"))["lr"] == 3e-3
        assert "grid:" in (found.path / "config.yaml").read_text(encoding="utf-8")
    trials = [run for run in scan(root) if run.trial]
    assert len(trials) == 12  # four learning rates and the better two of them again, for both arms
    assert {run.state for run in trials if run.trial == "5"} == {"diverged"}
    assert all(
        json.loads(p.read_text(encoding="utf-8"))["test"] is None for p in root.rglob("tune/**/results.json")
    )


def test_a_pilot_that_passes_lets_the_rest_run(run_oelm: Run, root: Path) -> None:
    code, output = run_oelm(*GOOD, "--seeds", "0", "1", "--pilot")
    assert code == 0, output
    assert "pilot: GOOD-1 and GOOD-2" in output
    assert len(results(root)) == 6


def test_a_pilot_that_fails_its_audit_stops_the_rest(run_oelm: Run, root: Path) -> None:
    code, output = run_oelm("GOOD-1", "UNSOUND-1", "GOOD-3", "--pilot")
    assert code == 1, output
    assert "the freeze audit failed" in output
    assert {run.id for run in scan(root)} == {"GOOD-1", "UNSOUND-1"}


def test_a_pilot_arm_that_is_far_worse_stops_the_rest_unless_the_limit_is_higher(
    run_oelm: Run, root: Path
) -> None:
    words = ("GOOD-1", "WORSE-1", "GOOD-3", "--seeds", "0", "1", "--pilot")
    code, output = run_oelm(*words)
    assert code == 1, output
    assert "WORSE-1 has validation ppl 4.007, GOOD-1 2.004, a factor of 2 (the limit is 1.5" in output
    assert len(results(root)) == 2
    code, output = run_oelm(*words, "--pilot-factor", "2")
    assert code == 0, output
    assert "pilot passed" in output
    assert len(results(root)) == 6


def test_a_pilot_of_tuned_arms_tunes_the_pair_first(run_oelm: Run, root: Path) -> None:
    words = ("TUNED-1", "TUNED-2", "GOOD-1", "--seeds", "3", "4", "--pilot")
    code, output = run_oelm(*words)
    assert code == 0, output
    before, passed, after = output.partition("pilot passed")
    assert passed
    assert "finished    TUNED-2 smoke seed 3" in before  # the pilot: one seed of each tuned arm
    assert "finished    TUNED-2 smoke seed 4" in after  # the other runs
    assert "finished    GOOD-1 smoke seed 3" in after


def test_diverged_runs_are_retried_only_with_the_flag(run_oelm: Run, root: Path) -> None:
    def starts_after(*words: str) -> int:
        code, output = run_oelm("DIVERGES-1", *words)
        assert code == 1, output
        assert "diverged    DIVERGES-1" in output
        (file,) = root.rglob("starts")
        return len(file.read_text(encoding="utf-8").splitlines())

    assert [starts_after(), starts_after(), starts_after("--retry-diverged")] == [1, 1, 2]


def test_one_experiment_named_twice_is_one_run(run_oelm: Run, root: Path) -> None:
    _, output = run_oelm("GOOD-1", "good-1", "--seeds", "0")
    assert "1 run: 1 finished" in output


def test_a_folder_with_a_broken_status_does_not_end_the_others(run_oelm: Run, root: Path) -> None:
    code, output = run_oelm("GOOD-1")
    (status,) = root.rglob("status.json")
    status.write_text("{", encoding="utf-8")
    code, output = run_oelm("GOOD-1", "GOOD-2", "--slots", "1", "--retries", "0")
    assert code == 1, output
    assert {run.id: run.state for run in scan(root)} == {"GOOD-1": "failed", "GOOD-2": "finished"}
    assert "not JSON" in output
    assert "Traceback" not in output


def test_damaged_results_of_a_finished_run_are_written_again(run_oelm: Run, root: Path) -> None:
    code, output = run_oelm("GOOD-1")
    assert code == 0, output
    undamaged = results(root)
    (file,) = root.rglob("results.json")
    file.write_text(file.read_text(encoding="utf-8").replace("2", "3"), encoding="utf-8")
    code, output = run_oelm("GOOD-1")
    assert code == 0, output
    assert results(root) == undamaged


def test_workers_know_the_datasets_of_the_users_catalogue(
    start_oelm: Start, root: Path, own_catalogue: Path
) -> None:
    """The stub looks up its dataset, as real training does."""
    own_catalogue.write_text(
        own_catalogue.read_text(encoding="utf-8")
        + "from oelm.data.catalogue import Dataset, register_dataset\n"
        + "register_dataset(Dataset(name='mine', about='x', files={'train': 'a.txt'}))\n"
        + "register_experiment(Experiment(id='GOOD-MINE', study='t', task='lm', data=DataConfig('mine'),"
        + " method='baseline', smoke={'budget.steps': 2, 'data.source': 'auto'}))\n"
    )
    process = start_oelm("GOOD-MINE", "--retries", "0", STUB_STEP_SECONDS="0")
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output


@pytest.mark.parametrize(
    ("code", "state"), [(EXIT_USAGE, "failed"), (EXIT_PERMANENT, "failed"), (EXIT_FAILED, "again")]
)
def test_a_run_that_always_fails_is_not_retried(tmp_path: Path, code: int, state: str) -> None:
    (job,) = make_jobs([experiment("GPT-01").at("smoke", 0)], tmp_path)
    LocalLauncher([], Machine(), retries=2)._set_state_after_exit(job, code)
    assert (job.state, job.failures) == (state, 1)
