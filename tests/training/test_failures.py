"""Failures of a run: each gives a reason for people and a state for launchers, and loses no work."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
from dataclasses import replace

import pytest
import torch

from oelm.errors import OelmError, UsageError
from oelm.runs.folder import RunFolder
from oelm.training import loop, setup
from oelm.training.checkpoints.file import _HashingWriter, load_checkpoint
from oelm.training.fit import fit
from oelm.training.optimizer import AdamW
from oelm.training.out_of_memory import is_out_of_memory
from oelm.training.tasks.classification import Classification
from oelm.training.tasks.lm import LanguageModelling


def rows(folder, kind):
    return [row.to_json() for row in RunFolder(folder).metrics(kind)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_as_diverged(tmp_path, machine, make, monkeypatch, bad):
    original, calls = LanguageModelling.loss, []

    def loss(self, model, tensors):
        calls.append(model.training)
        factor = bad if calls.count(True) == 6 else 1.0
        return original(self, model, tensors) * factor

    monkeypatch.setattr(LanguageModelling, "loss", loss)
    outcome = fit(make("lm"), tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("diverged", 76)
    timing = RunFolder(tmp_path).timing()  # also of the steps after the last checkpoint
    assert timing.warmup_steps + timing.num_steps_measured == 5
    assert "at step 6; the last finite loss was 5." in outcome.reason
    assert RunFolder(tmp_path).status().reason == outcome.reason
    assert RunFolder(tmp_path).results() is None
    assert load_checkpoint(tmp_path / "latest.pt")["progress"]["step"] == 4
    assert fit(make("lm"), tmp_path, machine).state == "diverged"  # and is not trained again


def test_an_exploding_loss_stops_as_diverged(tmp_path, machine, make):
    config = make("lm", "baseline", optim={"lr": 30.0, "warmup_steps": 0, "clip": 0.0}, budget={"steps": 100})
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "diverged"


class Memory:
    """Raises an error when a micro-batch has more than `most` rows."""

    def __init__(self, most, error):
        self.most, self.error, self.seen = most, error, []

    def watch(self, original):
        def loss(task, model, tensors):
            count = len(tensors["ids"])
            if count > self.most:
                raise self.error
            self.seen.append(count)
            return original(task, model, tensors)

        return loss


def test_only_out_of_memory_errors_are_recognised_as_such():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "cpu"],
)
def test_out_of_memory_halves_the_micro_batch_but_not_the_step(tmp_path, machine, make, monkeypatch, error):
    config = make("gpt-cls", model={"dropout": 0.0}, budget={"batch_size": 8, "log_every": 1})
    fit(config, tmp_path / "roomy", machine)
    memory = Memory(3, error)
    monkeypatch.setattr(Classification, "loss", memory.watch(Classification.loss))
    assert fit(config, tmp_path / "tight", machine).state == "finished"
    assert max(memory.seen) == 2
    texts = [row["text"] for row in rows(tmp_path / "tight", "event")]
    assert [t for t in texts if "micro-batches now have" in t] == [
        "out of memory: micro-batches now have 4 rows; the rows per step are unchanged",
        "out of memory: micro-batches now have 2 rows; the rows per step are unchanged",
    ]
    assert load_checkpoint(tmp_path / "tight" / "latest.pt")["progress"]["split"] == 4
    roomy, tight = (rows(tmp_path / name, "train") for name in ("roomy", "tight"))
    assert [r["tokens"] for r in roomy] == [r["tokens"] for r in tight]
    assert [r["loss"] for r in roomy] == pytest.approx([r["loss"] for r in tight], rel=1e-4)


def test_out_of_memory_with_single_rows_ends_as_oom(tmp_path, machine, make, monkeypatch):
    memory = Memory(0, MemoryError())
    monkeypatch.setattr(LanguageModelling, "loss", memory.watch(LanguageModelling.loss))
    outcome = fit(make("lm"), tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("oom", 1)
    assert "even with one row at a time" in outcome.reason
    assert RunFolder(tmp_path).status().state == "oom"


def test_out_of_memory_in_the_update_does_not_repeat_the_step(tmp_path, machine, make, monkeypatch):
    """Parameters that were already updated would silently be updated twice."""
    original, calls = AdamW.step, []

    def step(self, *args):
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *args)

    monkeypatch.setattr(AdamW, "step", step)
    outcome = fit(make("lm"), tmp_path, machine)
    assert outcome.state == "oom"
    assert "memory ran out in the update of the optimizer" in outcome.reason
    assert len(calls) == 6
    assert load_checkpoint(tmp_path / "latest.pt")["progress"]["step"] == 4
    monkeypatch.undo()
    assert fit(make("lm"), tmp_path, machine).state == "finished"


def test_a_folder_that_cannot_be_written_is_a_failure_with_a_reason(tmp_path, machine, make, monkeypatch):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OelmError, match="cannot write to the run folder"):
            fit(make("lm"), place, machine)

    def denied(folder, status):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder.status_file))

    monkeypatch.setattr(RunFolder, "write_status", denied)  # as in a read-only folder
    outcome = fit(make("lm"), tmp_path / "run", machine)
    assert outcome.state == "failed"
    assert "Permission denied" in outcome.reason


def test_a_folder_whose_run_failed_at_set_up_accepts_another_config(tmp_path, machine, make):
    impossible = replace(make("lm"), precision="fp16")
    with pytest.raises(UsageError, match="needs a CUDA device"):
        fit(impossible, tmp_path, machine)
    assert fit(make("lm", budget={"steps": 2}), tmp_path, machine).state == "finished"
    with pytest.raises(UsageError, match="contains a run with a different config"):
        fit(impossible, tmp_path, machine)


def test_a_signal_during_training_ends_as_interrupted(tmp_path, machine, make, monkeypatch):
    original, calls = LanguageModelling.loss, []

    def loss(self, model, tensors):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, model, tensors)

    monkeypatch.setattr(LanguageModelling, "loss", loss)
    outcome = fit(make("lm", budget={"eval_every": 100}), tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("interrupted", 75)
    assert "SIGUSR1" in outcome.reason
    assert load_checkpoint(tmp_path / "latest.pt")["progress"]["step"] == 4
    assert RunFolder(tmp_path).status().state == "interrupted"


def test_every_attempt_under_a_short_time_limit_makes_progress(tmp_path, machine, make):
    config, hurried = make("lm", budget={"steps": 4}), replace(machine, time_limit=1e-6)
    outcomes = [fit(config, tmp_path, hurried).state for _ in range(4)]
    assert outcomes[0] == "interrupted"
    steps = RunFolder(tmp_path).status().step
    assert steps >= 3
    assert fit(config, tmp_path, machine).state == "finished"


def test_a_full_disk_ends_as_interrupted(tmp_path, machine, make, monkeypatch):
    original, written = _HashingWriter.finish, []

    def finish(self):
        written.append(1)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self)

    monkeypatch.setattr(_HashingWriter, "finish", finish)
    outcome = fit(make("lm"), tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("interrupted", 75)
    assert "disk full" in outcome.reason
    assert "disk full" in RunFolder(tmp_path).status().reason
    assert load_checkpoint(tmp_path / "latest.pt")["progress"]["step"] == 4
    monkeypatch.undo()
    assert fit(make("lm"), tmp_path, machine).state == "finished"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_small_file_system_that_is_full(tmp_path, machine, make):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", disk], timeout=300, check=False
    ).returncode:
        pytest.skip("mounting is not permitted")
    try:
        config = make("lm", data={"tokenizer": "bpe-600"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "require_disk", lambda plan, folder: None)  # another program fills it later
            outcome = fit(config, disk / "run", machine)
        assert (outcome.state, outcome.exit_code) == ("interrupted", 75)
        assert "disk full" in outcome.reason
        assert RunFolder(disk / "run").status().reason == outcome.reason
        assert load_checkpoint(disk / "run" / "latest.pt")["progress"]["step"] >= 4
        assert (disk / "run" / "training.log").read_text(encoding="utf-8").startswith("20")
        refused = fit(config, disk / "other", machine)
        assert refused.state == "interrupted"
        assert "disk full: this run needs" in refused.reason
    finally:
        subprocess.run(["umount", str(disk)], timeout=300, check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": {"batch_size": 0}}, "batch_size must be at least 1"),
        ({"budget": {"steps": 0}}, "both 0, so nothing would be trained"),
        ({"optim": {"lr": 0.0}}, r"optim\.lr must be positive"),
        ({"optim": {"lr": math.inf}}, r"optim\.lr must be positive"),
        ({"optim": {"warmup_steps": -5}}, r"optim\.warmup_steps must be at least 0"),
        ({"optim": {"warmup_share": 2.0}}, r"optim\.warmup_share must be between 0 and 1"),
        ({"optim": {"final_lr_share": -1.0}}, r"optim\.final_lr_share must be between 0 and 1"),
        ({"optim": {"warmup_steps": 5, "warmup_share": 0.1}}, "the warm-up has only one length"),
        (
            {"optim": {"schedule": "constant", "final_lr_share": 0.1}},
            "no effect on the schedule constant",
        ),
        ({"optim": {"beta1": 1.5}}, r"optim\.beta1"),
        ({"optim": {"eps": math.nan}}, r"optim\.eps"),
        ({"optim": {"clip": -1.0}}, r"optim\.clip must be at least 0"),
        ({"model": {"dropout": 2.0}}, r"model\.dropout must be between 0 and 1"),
        ({"budget": {"log_every": 0}}, r"budget\.log_every must be at least 1"),
        ({"data": {"pad_to_max": True}}, r"pad_to_max has no effect"),
        ({"model": {"name": "smok"}}, "did you mean 'smoke'"),
        ({"model": {"pretrained": True}}, "the built-in GPT has no pretrained weights"),
        ({"model": {"causal": False}}, "a language model must be causal"),
        ({"model": {"family": "hf", "name": "tiny-bert"}}, "task lm cannot train a transformers model"),
        ({"data": {"dataset": "storys"}}, "did you mean 'stories'"),
        ({"data": {"dataset": "stories-2way"}}, "is for classification"),
        ({"data": {"max_length": 0}}, "max_length must be at least 1"),
        ({"data": {"tokenizer": "bpe-many"}}, "has no vocabulary size"),
    ],
)
def test_invalid_settings_are_errors_before_a_folder_is_created(tmp_path, machine, make, changes, message):
    with pytest.raises(UsageError, match=message):
        fit(make("lm", **changes), tmp_path / "run", machine)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70])
def test_a_seed_outside_the_valid_range_is_an_error(tmp_path, machine, make, seed):
    with pytest.raises(UsageError, match="seed must be a whole number from 0"):
        fit(replace(make("lm"), seed=seed), tmp_path, machine)


def test_a_negative_number_of_threads_is_an_error(tmp_path, machine, make):
    with pytest.raises(UsageError, match="threads must be 0"):
        fit(make("lm"), tmp_path, replace(machine, threads=-1))


def test_a_max_length_too_short_for_denoising_is_an_error(tmp_path, machine, make):
    with pytest.raises(UsageError, match="max_length of at least 10"):
        fit(make("t5", data={"max_length": 9}), tmp_path, machine)


def test_an_empty_split_is_a_failure_with_a_reason(tmp_path, machine, make, monkeypatch):
    monkeypatch.setattr(LanguageModelling, "eval_batches", lambda task, split, rows: iter(()))
    outcome = fit(make("lm"), tmp_path, machine)
    assert outcome.state == "failed"
    assert "the validation split is too short" in outcome.reason


def test_a_warm_up_longer_than_the_run_is_logged(tmp_path, machine, make):
    fit(make("lm", optim={"warmup_steps": 100}, budget={"steps": 2}), tmp_path, machine)
    log = (tmp_path / "training.log").read_text(encoding="utf-8")
    assert "the learning rate never rises above 2 % of optim.lr" in log


def test_a_missing_tokenizer_is_a_failure_with_a_reason(tmp_path, machine, make, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = fit(make("lm", data={"tokenizer": "no-such-tokenizer"}), tmp_path, machine)
    assert outcome.state == "failed"
    assert "no-such-tokenizer" in outcome.reason


def test_a_bug_is_recorded_and_raised(tmp_path, machine, make, monkeypatch):
    def broken(self, model, tensors):
        raise KeyError("surprise")

    monkeypatch.setattr(LanguageModelling, "loss", broken)
    with pytest.raises(KeyError):
        fit(make("lm"), tmp_path, machine)
    assert RunFolder(tmp_path).status().state == "failed"
    assert "surprise" in RunFolder(tmp_path).log_file.read_text(encoding="utf-8")


def test_a_changed_frozen_parameter_fails_the_audit(tmp_path, machine, make, monkeypatch):
    original = loop.audit_freezing

    def tampered(run, when):
        if when == "end":
            with torch.no_grad():
                run.learner.model.blocks[0].attn.q.weight.mul_(1.01)
        original(run, when)

    monkeypatch.setattr(loop, "audit_freezing", tampered)
    outcome = fit(make("lm"), tmp_path, machine)
    assert outcome.state == "failed"
    assert "its bytes changed since it was frozen" in outcome.reason
