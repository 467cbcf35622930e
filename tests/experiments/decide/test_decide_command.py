"""`oelm decide` with stub training: what it decides, when it stops, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.runs.scan import scan


def seeds_of(root: Path, id: str) -> list[int]:
    return sorted(run.seed for run in scan(root) if run.id == id and run.state == "finished")


def test_a_large_difference_is_decided_after_few_seeds(run_oelm, tmp_path):
    code, output = run_oelm("NOISY-WORSE", command="decide")
    assert code == 0, output
    assert "NOISY-WORSE against NOISY-BASE (baseline), target: missed, stopped at n = 3" in output
    assert "2 of 2 questions decided" in output
    assert seeds_of(tmp_path / "runs", "NOISY-BASE") == [0, 1, 2]  # the baseline was added
    code, output = run_oelm("NOISY-WORSE", "--json", command="decide")
    facts, _ = json.JSONDecoder().raw_decode(output)
    assert [(q["rule"], q["state"], q["n"]) for q in facts["questions"]] == [
        ("target", "missed", 3),
        ("sign", "worse", 3),
    ]
    assert facts["runs"] == []


def test_runs_before_max_seeds_was_fixed_are_counted(run_oelm):
    code, output = run_oelm("NOISY-WORSE", "--seeds", "0-1", command="run")
    assert code == 0, output
    _, output = run_oelm("NOISY-WORSE", "--dry-run", command="decide")
    assert "note: 2 runs ended before --max-seeds was fixed" in output
    for words in (["--dry-run"], []):
        _, output = run_oelm("NOISY-WORSE", "--json", *words, command="decide")
        facts, _ = json.JSONDecoder().raw_decode(output)
        assert facts["runs_before"] == 2


def test_what_stays_undecided_has_its_own_exit_code_and_reason(run_oelm, tmp_path):
    words = ("NOISY-SAME", "NOISY-DIVERGES-LATE", "--max-seeds", "8")
    code, output = run_oelm(*words, command="decide")
    assert code == 3, output
    assert "sign: too close to the margin: the probability of a verdict with 8 seeds is" in output
    assert "target: met, stopped at n = 3" in output


def test_a_run_that_fails_is_named(run_oelm, tmp_path):
    code, output = run_oelm("NOISY-CRASHES", command="decide")
    assert code == 1
    assert "failed: NOISY-CRASHES smoke seed 0: RuntimeError: device lost" in output


@pytest.mark.parametrize("command", ["run", "decide"])
def test_the_reason_of_a_failed_trial_is_printed_when_it_fails_and_at_the_end(run_oelm, command):
    words = ("NOISY-CRASHES", "--tune", "--grid", "1e-3", "3e-3", "--retries", "0")
    code, output = run_oelm(*words, command=command)
    assert code == 1
    lines = [line for line in output.splitlines() if "lr=0.001 seed 1000" in line and "device lost" in line]
    assert len(lines) == 2, output


def test_the_plan_is_printed_without_a_run(run_oelm, tmp_path):
    code, output = run_oelm("NOISY-WORSE", "--dry-run", "--max-seeds", "10", command="decide")
    assert code == 0, output
    assert "runs: 6 to 20 (2 arms); 0 tuning trials" in output
    assert "questions are checked at 3 to 10 seeds, each time with a 98.81 % interval" in output
    assert "disk: at most" in output
    assert not list((tmp_path / "runs").glob("*"))


def test_invalid_input_is_named(run_oelm, tmp_path):
    refused = {
        ("NOISY-BASE",): "there is no question to decide about NOISY-BASE",
        ("NOISY-SAME", "--rules", "scenario"): "there is no question",
        ("NOISY-SAME", "--max-seeds", "2"): "--max-seeds must be from 3 to 50",
        ("NOISY-SAME", "--budget", "0"): "is shorter than one run of NOISY-",
    }
    for words, message in refused.items():
        code, output = run_oelm(*words, command="decide")
        assert code == 2, output
        assert message in output
    assert not list((tmp_path / "runs").glob("*/*"))


def test_rules_cannot_select_among_the_questions_of_a_study_file(run_oelm, tmp_path):
    file = tmp_path / "my.yaml"
    assert main(["init", str(file)]) == 0
    code, output = run_oelm(str(file), "--rules", "sign", "--dry-run", command="decide")
    assert code == 2
    assert "--rules has no effect on the questions of a study file" in output


def test_built_in_text_in_place_of_a_dataset_gets_no_verdict_and_no_runs(run_oelm, tmp_path):
    code, output = run_oelm("GOOD-2", command="decide")
    assert code == 3
    assert "built-in generated text was used instead of tinystories" in output
    _, plan = run_oelm("GOOD-2", "--dry-run", command="decide")
    assert "built-in generated text was used instead of tinystories" in plan
    assert not list((tmp_path / "runs").glob("*/*/scale*"))


def test_after_sigkill_the_same_command_goes_on(start_oelm, run_oelm, tmp_path):
    words = ("NOISY-WORSE", "--rules", "target", "--slots", "1")
    process = start_oelm(*words, name="decide", STUB_STEP_SECONDS="0.2")
    deadline = time.monotonic() + 120
    while not any(run.state == "running" for run in scan(tmp_path / "runs")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(run.state == "running" for run in scan(tmp_path / "runs")):  # its worker ends by itself
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, output = run_oelm(*words, command="decide")
    assert code == 0, output
    assert "target: missed, stopped at n = 3" in output
