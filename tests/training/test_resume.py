"""Stopped at any moment, the same call continues, and every number ends the same, bit by bit.

Real kills, at every file operation and by the clock, are in tests/torture.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import oelm
from oelm.errors import OelmError
from oelm.files import atomic
from oelm.runs.folder import RunFolder
from oelm.training.checkpoint import load_checkpoint
from oelm.training.fit import fit
from oelm.training.run import Interrupted, Run

EQUAL_FILES = ("metrics.jsonl", "results.json", "latest.pt", "freeze_audit.json", "best/model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """The files that must not know how often a run was interrupted."""
    for name in EQUAL_FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), f"{name} differs"
    a, b = load_checkpoint(one / "latest.pt"), load_checkpoint(other / "latest.pt")
    assert a["progress"] == b["progress"]
    for part in ("model", "optimizer"):
        assert a[part].keys() == b[part].keys()
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    for name, state in a["optimizer"].items():
        for key, tensor in state.items():
            assert torch.equal(tensor, b["optimizer"][name][key]), (name, key)


@pytest.mark.parametrize("shape", ["lm", "gpt-cls", "bert", "t5", "bart"])
def test_stopped_between_any_micro_batches(tmp_path, machine, make, shape, monkeypatch):
    """Asked to stop in the middle of a step, in a validation and in the test: nothing is lost or repeated."""
    config = make(
        shape,
        "oelm-early",
        model={"dropout": 0.1},
        data={"eval_rows": 2},
        budget={"accumulation": 2, "checkpoint_every": 5},
    )
    assert fit(config, tmp_path / "whole", machine).state == "finished"
    interrupt_now_and_then(monkeypatch)
    outcomes = []
    while not outcomes or outcomes[-1].state == "interrupted":
        outcomes.append(fit(config, tmp_path / "stopped", machine))
        assert len(outcomes) < 60
    assert outcomes[-1].state == "finished"
    assert len(outcomes) > 3
    assert all(outcome.exit_code == 75 for outcome in outcomes[:-1])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("name", [name for name, m in oelm.methods().items() if m.has_extras])
def test_every_method_with_extras_continues_bit_by_bit(tmp_path, machine, make, name, monkeypatch):
    config = make(
        "lm",
        name,
        model={"position": "rope"},
        data={"eval_rows": 2},
        budget={"steps": 4, "eval_every": 2, "checkpoint_every": 1},
    )
    assert fit(config, tmp_path / "whole", machine).state == "finished"
    interrupt_now_and_then(monkeypatch)
    times = 0
    while fit(config, tmp_path / "stopped", machine).state == "interrupted":
        times += 1
        assert times < 20
    assert times > 1
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    extras = "best/oelm_extras.safetensors"
    assert (tmp_path / "whole" / extras).read_bytes() == (tmp_path / "stopped" / extras).read_bytes()
    audits = json.loads((tmp_path / "stopped" / "freeze_audit.json").read_text())
    assert not [row for audit in audits.values() for row in audit["rows"] if row["faults"]]


def interrupt_now_and_then(monkeypatch) -> None:
    """As a signal would, in training and evaluation alike; ever less often, so that it ends."""
    looks, next_stop, patience = 0, 5, 4

    def check(run):
        nonlocal looks, next_stop, patience
        looks += 1
        if looks == next_stop:
            patience += 3
            next_stop = looks + patience
            raise Interrupted("test")

    monkeypatch.setattr(Run, "check_stop", check)


def test_damaged_latest_falls_back_to_previous(tmp_path, machine, make):
    config = make("lm")
    assert fit(config, tmp_path / "whole", machine).state == "finished"
    assert fit(config, tmp_path / "hurt", machine).state == "finished"
    folder = RunFolder(tmp_path / "hurt")
    content = folder.latest.read_bytes()
    folder.latest.write_bytes(content[: len(content) // 2])
    folder.results_file.unlink()
    assert fit(config, folder.path, machine).state == "finished"
    assert "checksum does not match" in folder.log_file.read_text()
    assert "going back to the checkpoint before" in folder.log_file.read_text()
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")


def test_a_kill_after_the_fallback_leaves_the_good_one(tmp_path, machine, make, monkeypatch):
    """The damaged checkpoint must not take the place of the one before while the next is written."""
    config, folder = make("lm"), RunFolder(tmp_path)
    assert fit(config, tmp_path, machine).state == "finished"
    folder.results_file.unlink()
    folder.latest.write_bytes(folder.latest.read_bytes()[:-1])
    replace_file = os.replace

    def killed(source, target):
        if str(target) == str(folder.latest) and str(source).endswith(".tmp"):
            raise KeyboardInterrupt
        replace_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(config, tmp_path, machine)
    assert fit(config, tmp_path, machine).state == "finished"


def damage_best(best: Path, damage: str) -> None:
    """As a bad disk, a hasty hand or a torn copy would."""
    weights = best / "model.safetensors"
    if damage == "folder gone":
        best.rename(best.with_name("elsewhere"))
    elif damage == "weights gone":
        weights.unlink()
    elif damage == "extras cut":
        (best / "oelm_extras.safetensors").write_bytes(b"half")
    else:
        flip_bit(weights, -5)


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


BEST_DAMAGE = ["folder gone", "weights gone", "extras cut", "one bit"]


@pytest.mark.parametrize("damage", BEST_DAMAGE)
def test_a_damaged_best_model_is_written_again_where_a_checkpoint_has_its_weights(
    tmp_path, machine, make, damage
):
    config = make("lm", "oelm-plus")
    for name in ("whole", "hurt"):
        assert fit(config, tmp_path / name, machine).state == "finished"
    folder = RunFolder(tmp_path / "hurt")
    folder.results_file.unlink()
    damage_best(folder.best, damage)
    assert fit(config, folder.path, machine).state == "finished"
    assert "it is written again from the checkpoint" in folder.log_file.read_text()
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")


@pytest.mark.parametrize("damage", BEST_DAMAGE)
def test_the_last_weights_never_stand_in_for_the_best(tmp_path, machine, make, damage, monkeypatch):
    """Validated at step 4, checkpoints at 5 and 6: none has the best weights. Said before any step."""
    config = make("lm", "oelm-plus", budget={"checkpoint_every": 1})
    stop_after(monkeypatch, 6)
    assert fit(config, tmp_path, machine).state == "interrupted"
    monkeypatch.undo()
    folder = RunFolder(tmp_path)
    damage_best(folder.best, damage)
    rows = folder.metrics_file.read_bytes()
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "failed"
    assert str(folder.best) in outcome.reason
    assert "remove latest.pt and previous.pt to start the run over" in outcome.reason
    assert folder.metrics_file.read_bytes() == rows
    for checkpoint in folder.checkpoints:
        checkpoint.unlink()
    assert fit(config, tmp_path, machine).state == "finished"


def stop_after(monkeypatch, step: int) -> None:
    def check(run):
        if run.progress.step >= step:
            raise Interrupted("test")

    monkeypatch.setattr(Run, "check_stop", check)


def test_a_bit_that_flips_in_the_best_model_during_the_run_does_not_reach_the_test_score(
    tmp_path, machine, make, monkeypatch
):
    config, folder, load_best = make("lm"), RunFolder(tmp_path), Run.load_best

    def flipped(run):
        flip_bit(folder.best / "model.safetensors", -5)
        load_best(run)

    monkeypatch.setattr(Run, "load_best", flipped)
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "failed"
    assert "model.safetensors has changed since it was written" in outcome.reason
    assert folder.results() is None
    monkeypatch.undo()
    with pytest.raises(OelmError, match="is damaged"):
        oelm.load(folder.best)
    assert fit(config, tmp_path, machine).state == "finished"
    oelm.load(folder.best)


def lose_a_row(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def change_a_number(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    loss = lines[number].index(b'"loss": ') + 9
    lines[number] = lines[number][:loss] + b"7" + lines[number][loss + 1 :]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("damage", [lose_a_row, change_a_number])
def test_damaged_metrics_never_survive_a_resume(tmp_path, machine, make, damage, monkeypatch):
    """In rows since the checkpoint before: that one is used. In older ones: an error with the remedy."""
    config = make("lm", budget={"log_every": 1, "checkpoint_every": 3})
    assert fit(config, tmp_path / "whole", machine).state == "finished"
    stop_after(monkeypatch, 6)
    folder = RunFolder(tmp_path / "hurt")
    assert fit(config, folder.path, machine).state == "interrupted"
    monkeypatch.undo()
    last = len(folder.metrics_file.read_bytes().splitlines()) - 1
    damage(folder.metrics_file, last)
    assert fit(config, folder.path, machine).state == "finished"
    assert "going back to the checkpoint before" in folder.log_file.read_text()
    assert_same_run(tmp_path / "whole", folder.path)

    damage(folder.metrics_file, 0)
    outcome = fit(config, folder.path, machine)  # finished, but its checksums do not match any more
    assert outcome.state == "failed"
    assert "metrics.jsonl" in outcome.reason
    assert "remove latest.pt and previous.pt to start the run over" in outcome.reason


def test_no_whole_checkpoint_is_an_error_not_a_fresh_start(tmp_path, machine, make):
    config = make("lm", budget={"steps": 4})
    fit(config, tmp_path, machine)
    folder = RunFolder(tmp_path)
    folder.results_file.unlink()
    for path in (folder.latest, folder.previous):
        if path.exists():
            path.write_bytes(b"nonsense")
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "failed"
    assert "no checkpoint of this run is usable" in outcome.reason


def test_changed_data_is_noticed(tmp_path, machine, make):
    lines = [f'{{"text": "a story about {word} and its friend"}}\n' for word in ("fox", "owl", "cat")] * 20
    data = tmp_path / "data" / "tinystories"
    data.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text("".join(lines))
    config = make("lm", data={"dataset": "tinystories", "source": "local", "train_rows": 0, "eval_rows": 0})
    local = replace(machine, data_dir=str(tmp_path / "data"))
    assert fit(config, tmp_path / "run", local).state == "finished"
    RunFolder(tmp_path / "run").results_file.unlink()
    (data / "test.jsonl").write_text("".join(lines[1:]))
    outcome = fit(config, tmp_path / "run", local)
    assert outcome.state == "failed"
    assert "the test data is not what this run began with" in outcome.reason
