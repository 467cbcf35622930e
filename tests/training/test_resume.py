"""A run that is stopped at any moment continues with the same call, and its result is bit-identical.

Real kills, at every file operation and at random times, are in tests/torture.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_checks import assert_same_run, flip_bits, stop_after

import oelm
from oelm.errors import OelmError
from oelm.files import atomic
from oelm.runs.folder import RunFolder
from oelm.training import loop, setup
from oelm.training.checkpoints.file import load_checkpoint
from oelm.training.fit import fit
from oelm.training.precision import Precision
from oelm.training.state import Interrupted, Training


@pytest.fixture
def copy_of(reference, tmp_path):
    """Return a function that copies the finished run of a config, and removes its results.json.

    Without results.json the run counts as interrupted after its last checkpoint.
    """

    def copy(config) -> RunFolder:
        folder = RunFolder(shutil.copytree(reference(config), tmp_path / "copy"))
        folder.results_file.unlink()
        return folder

    return copy


def interrupt_repeatedly(monkeypatch) -> None:
    """Interrupt runs as signals would, in training and evaluation, at growing intervals so that they end."""
    checks, next_stop, interval = 0, 5, 4

    def check_stop(training):
        nonlocal checks, next_stop, interval
        checks += 1
        if checks == next_stop:
            interval += 3
            next_stop = checks + interval
            raise Interrupted("test")

    monkeypatch.setattr(Training, "check_stop", check_stop)


def run_until_finished(config, folder, machine) -> int:
    """Call `fit` until the run is finished; return the number of interruptions."""
    for interruptions in range(60):
        outcome = fit(config, folder, machine)
        if outcome.state == "finished":
            return interruptions
        assert (outcome.state, outcome.exit_code) == ("interrupted", 75)
    raise AssertionError("the run does not end")


@pytest.mark.parametrize("shape", ["lm", "gpt-cls", "bert", "t5"])
def test_a_run_interrupted_between_micro_batches_resumes_exactly(
    tmp_path, machine, make, reference, shape, monkeypatch
):
    """Interrupted inside steps, validations and the test: nothing is lost or repeated."""
    config = make(
        shape,
        "oelm-early",
        model={"dropout": 0.1},
        budget={"accumulation": 2, "steps": 6, "eval_every": 3, "checkpoint_every": 5},
    )
    expected = reference(config)
    interrupt_repeatedly(monkeypatch)
    assert run_until_finished(config, tmp_path, machine) > 1
    assert_same_run(expected, tmp_path)
    one, other = (load_checkpoint(folder / "latest.pt") for folder in (expected, tmp_path))
    assert one["progress"] == other["progress"]
    assert one["optimizer"].keys() == other["optimizer"].keys()
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())


# The other controls with trained Q/K have the same extras as the methods that freeze.
WITH_EXTRAS = [name for name, m in oelm.methods().items() if m.has_extras and m.freeze != "none"]


@pytest.mark.parametrize("name", [*WITH_EXTRAS, "trained-plus"])
def test_methods_with_extras_resume_exactly(tmp_path, machine, make, reference, name, monkeypatch):
    budget = {"steps": 3, "eval_every": 2, "checkpoint_every": 1}
    config = make("lm", name, model={"position": "rope"}, budget=budget)
    expected = reference(config)
    interrupt_repeatedly(monkeypatch)
    assert run_until_finished(config, tmp_path, machine) > 1
    assert_same_run(expected, tmp_path)
    extras = "best/oelm_extras.safetensors"
    assert (expected / extras).read_bytes() == (tmp_path / extras).read_bytes()
    audits = json.loads((tmp_path / "freeze_audit.json").read_text(encoding="utf-8"))
    assert not [row for audit in audits.values() for row in audit["rows"] if row["faults"]]


def test_a_damaged_latest_checkpoint_is_replaced_by_the_previous_one(machine, make, reference, copy_of):
    config = make("lm")
    folder = copy_of(config)
    content = folder.latest.read_bytes()
    folder.latest.write_bytes(content[: len(content) // 2])
    assert fit(config, folder.path, machine).state == "finished"
    log = folder.log_file.read_text(encoding="utf-8")
    assert "checksum does not match" in log
    assert "resuming from the checkpoint before it" in log
    assert_same_run(reference(config), folder.path)


def test_a_kill_while_the_previous_checkpoint_is_in_use_keeps_it(machine, make, copy_of, monkeypatch):
    """The damaged latest.pt must not be rotated into previous.pt while the next checkpoint is written."""
    config = make("lm")
    folder, replace_file = copy_of(config), os.replace
    folder.latest.write_bytes(folder.latest.read_bytes()[:-1])

    def killed(source, target):
        if str(target) == str(folder.latest) and str(source).endswith(".tmp"):
            raise KeyboardInterrupt
        replace_file(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(config, folder.path, machine)
    assert fit(config, folder.path, machine).state == "finished"


def damage_best(best: Path, damage: str) -> None:
    weights = best / "model.safetensors"
    if damage == "folder missing":
        best.rename(best.with_name("elsewhere"))
    elif damage == "weights missing":
        weights.unlink()
    elif damage == "extras truncated":
        (best / "oelm_extras.safetensors").write_bytes(b"half")
    else:
        flip_bits(weights, -5)


BEST_DAMAGE = ["folder missing", "weights missing", "extras truncated", "one bit"]


@pytest.mark.parametrize("damage", BEST_DAMAGE)
def test_a_damaged_best_model_is_written_again_from_a_checkpoint_with_its_weights(
    machine, make, reference, copy_of, damage
):
    config = make("lm", "oelm-plus", budget={"steps": 2, "eval_every": 2})
    folder = copy_of(config)
    damage_best(folder.best, damage)
    assert fit(config, folder.path, machine).state == "finished"
    assert "writing it again from the checkpoint" in folder.log_file.read_text(encoding="utf-8")
    assert_same_run(reference(config), folder.path)


@pytest.fixture(scope="module")
def stopped_after_best(tmp_path_factory, machine, make) -> Path:
    """A run with its best model from step 3 and checkpoints of steps 4 and 5."""
    folder = tmp_path_factory.mktemp("stopped")
    config = make("lm", "oelm-plus", budget={"steps": 6, "eval_every": 3, "checkpoint_every": 1})
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5)
        assert fit(config, folder, machine).state == "interrupted"
    return folder


@pytest.mark.parametrize("damage", BEST_DAMAGE)
def test_other_weights_never_replace_a_damaged_best_model(tmp_path, machine, stopped_after_best, damage):
    """No checkpoint has the best weights, so the run fails before its next step."""
    folder = RunFolder(shutil.copytree(stopped_after_best, tmp_path / "run"))
    damage_best(folder.best, damage)
    rows = folder.metrics_file.read_bytes()
    outcome = fit(folder.config(), folder.path, machine)
    assert outcome.state == "failed"
    assert str(folder.best) in outcome.reason
    assert "delete latest.pt and previous.pt to start the run" in " ".join(outcome.reason.split())
    assert folder.metrics_file.read_bytes() == rows
    if damage == "one bit":
        for checkpoint in folder.checkpoints:
            checkpoint.unlink()
        assert fit(folder.config(), folder.path, machine).state == "finished"


def kill_after_best(config, folder, machine, step) -> None:
    """Kill a run between writing the best model of `step` and the next checkpoint."""
    save_best = loop.save_best

    def save_and_die(training):
        save_best(training)
        if training.progress.step == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_best", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            fit(config, folder.path, machine)


def worsen_validations(patch, first) -> None:
    """Make validations from step `first` on worse, as another machine might round them."""
    score = loop.score

    def worse(training, split):
        found = score(training, split)
        changed = split == "validation" and training.progress.step >= first
        return replace(found, loss=found.loss + 9) if changed else found

    patch.setattr(loop, "score", worse)


@pytest.mark.parametrize("checkpoint_every", [2, 3])
def test_a_kill_after_the_best_model_was_written_changes_nothing(
    tmp_path, machine, make, reference, checkpoint_every
):
    config = make("lm", budget={"steps": 6, "eval_every": 2, "checkpoint_every": checkpoint_every})
    folder = RunFolder(tmp_path)
    kill_after_best(config, folder, machine, step=4)
    assert fit(config, folder.path, machine).state == "finished"
    assert_same_run(reference(config), folder.path)


def test_the_best_model_is_the_one_of_the_results_also_on_another_machine(
    tmp_path, machine, make, monkeypatch
):
    config = make("lm", budget={"steps": 6, "eval_every": 2})
    folder = RunFolder(tmp_path)
    kill_after_best(config, folder, machine, step=4)
    weights = load_checkpoint(folder.latest)["model"]  # of step 2
    worsen_validations(monkeypatch, first=4)
    assert fit(config, folder.path, machine).state == "finished"
    assert folder.results().validation.step == 2
    best = oelm.load(folder.best).state_dict()
    assert all(torch.equal(best[name], tensor) for name, tensor in weights.items())


def test_a_best_model_of_another_step_than_the_best_validation_is_an_error(
    tmp_path, machine, make, monkeypatch
):
    """The weights of step 2 are lost: best/ has those of step 4, and the checkpoint those of step 3."""
    config = make("lm", budget={"steps": 6, "eval_every": 2, "checkpoint_every": 3})
    folder = RunFolder(tmp_path)
    kill_after_best(config, folder, machine, step=4)
    worsen_validations(monkeypatch, first=4)
    for _ in range(2):
        outcome = fit(config, folder.path, machine)
        assert outcome.state == "failed"
        assert "best is the model of step 4, but the best validation was at step 2" in outcome.reason
        assert "delete latest.pt and previous.pt to start the run over" in " ".join(outcome.reason.split())
    assert folder.results() is None


def test_a_best_model_damaged_during_the_run_is_not_tested(machine, make, copy_of, monkeypatch):
    config = make("lm")
    folder, load_best = copy_of(config), loop.load_best

    def damaged_load_best(training):
        flip_bits(folder.best / "model.safetensors", -5)
        load_best(training)

    monkeypatch.setattr(loop, "load_best", damaged_load_best)
    outcome = fit(config, folder.path, machine)
    assert outcome.state == "failed"
    assert "model.safetensors has changed since it was written" in outcome.reason
    assert folder.results() is None
    monkeypatch.undo()
    with pytest.raises(OelmError, match="is damaged"):
        oelm.load(folder.best)
    assert fit(config, folder.path, machine).state == "finished"
    assert oelm.audit(oelm.load(folder.best)).ok


def lose_a_row(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def change_a_number(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    loss = lines[number].index(b'"loss": ') + 9
    lines[number] = lines[number][:loss] + b"7" + lines[number][loss + 1 :]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("damage", [lose_a_row, change_a_number])
def test_damaged_metrics_are_never_kept(tmp_path, machine, make, reference, damage, monkeypatch):
    """Damage after the previous checkpoint is repaired by resuming from it; older damage is an error."""
    config = make("lm", budget={"steps": 6, "log_every": 1, "checkpoint_every": 2})
    folder = RunFolder(tmp_path)
    stop_after(monkeypatch, 4)
    assert fit(config, folder.path, machine).state == "interrupted"
    monkeypatch.undo()
    last = len(folder.metrics_file.read_bytes().splitlines()) - 1
    damage(folder.metrics_file, last)
    assert fit(config, folder.path, machine).state == "finished"
    assert "resuming from the checkpoint before it" in folder.log_file.read_text(encoding="utf-8")
    assert_same_run(reference(config), folder.path)

    damage(folder.metrics_file, 0)
    outcome = fit(config, folder.path, machine)  # finished, but the checksums no longer match
    assert outcome.state == "failed"
    assert "metrics.jsonl" in outcome.reason
    assert "delete latest.pt and previous.pt to start the run" in " ".join(outcome.reason.split())


def test_a_run_without_a_usable_checkpoint_fails_instead_of_starting_over(machine, make, copy_of):
    config = make("lm")
    folder = copy_of(config)
    for path in folder.checkpoints:
        path.write_bytes(b"nonsense")
    outcome = fit(config, folder.path, machine)
    assert outcome.state == "failed"
    assert "no checkpoint of this run is usable" in outcome.reason


def test_changed_data_is_an_error(tmp_path, machine, make):
    lines = [f'{{"text": "a story about {word} and its friend"}}\n' for word in ("fox", "owl", "cat")] * 20
    data = tmp_path / "data" / "tinystories"
    data.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        (data / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    rows = {"dataset": "tinystories", "source": "local", "train_rows": 0, "eval_rows": 0}
    config = make("lm", data=rows, budget={"steps": 2, "eval_every": 2})
    local = replace(machine, data_dir=str(tmp_path / "data"))
    assert fit(config, tmp_path / "run", local).state == "finished"
    RunFolder(tmp_path / "run").results_file.unlink()
    (data / "test.jsonl").write_text("".join(lines[1:]), encoding="utf-8")
    outcome = fit(config, tmp_path / "run", local)
    assert outcome.state == "failed"
    assert "the test data of this run" in outcome.reason


def test_a_run_resumed_in_another_number_format_records_both(tmp_path, machine, make, monkeypatch):
    class Bf16(Precision):  # stands for a device with bf16; computes in fp32
        def autocast(self):
            return contextlib.nullcontext()

    config = make("lm")
    with monkeypatch.context() as patched:
        patched.setattr(setup, "choose_precision", lambda *_: Bf16("bf16", "the device has bf16"))
        stop_after(patched, 4)
        fit(config, tmp_path / "run", machine)
    assert fit(config, tmp_path / "run", machine).state == "finished"
    assert RunFolder(tmp_path / "run").manifest().precision.dtype == "bf16 then fp32"
