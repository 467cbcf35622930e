"""Whole runs at smoke scale: what a user finds in the folder, and what happens when something goes wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
from dataclasses import replace

import pytest
import torch

import oelm
from oelm.data.tokenizers import Tokenizer
from oelm.errors import UsageError
from oelm.models.gpt import GPT
from oelm.training import setup
from oelm.training.checkpoint import _HashingWriter, load_checkpoint
from oelm.training.fit import fit
from oelm.training.folder import RunFolder
from oelm.training.tasks.classification import Classification
from oelm.training.tasks.lm import LanguageModelling


def rows(folder, kind):
    return list(RunFolder(folder).metrics(kind))


def test_language_model_run_leaves_every_file(tmp_path, machine, make):
    config = make("lm")
    outcome = fit(config, tmp_path, replace(machine, gemm_peak=True))
    assert (outcome.state, outcome.exit_code) == ("finished", 0)
    folder = RunFolder(tmp_path)
    assert folder.config() == config
    results, manifest, status = folder.results(), folder.manifest(), folder.status()
    assert results["metric"] == "ppl"
    assert results["test"]["ppl"] == pytest.approx(math.exp(results["test"]["loss"]))
    assert results["steps"] == 12
    assert results["tokens_seen"] == 12 * 4 * 16
    assert results["parameters"]["frozen"] == results["parameters"]["qk_total"] == 4096
    assert results["fairness"]["batch_rows"] == 4
    assert manifest["precision"] == {"dtype": "fp32", "reason": "the default on cpu"}
    assert manifest["data"]["fingerprints"].keys() == {"train", "validation", "test"}
    assert manifest["tokenizer"]["vocab_size"] == 300
    assert manifest["disk_bytes_planned"] > folder.latest.stat().st_size
    assert status.state == "finished"
    assert status.step == status.total_steps == 12
    assert [r["step"] for r in rows(tmp_path, "train")] == [3, 6, 9, 12]
    assert [r["step"] for r in rows(tmp_path, "validation")] == [4, 8, 12]
    assert [len(r["layers"]) for r in rows(tmp_path, "attention")] == [2, 2, 2]
    best = min(rows(tmp_path, "validation"), key=lambda r: r["loss"])
    assert results["validation"]["loss"] == best["loss"]
    assert results["validation"]["step"] == best["step"]
    audits = folder.freeze_audit()
    assert audits["start"]["ok"]
    assert audits["end"]["ok"]
    timing = folder.timing()
    assert timing["num_steps_measured"] == 9
    assert 0 < timing["predicted_saving"] < 4 / 72
    assert timing["gemm_peak_flops"] > 0
    assert "disk: at most" in folder.log_file.read_text()
    # Times stay out of what must be equal between machines and resumes.
    assert not {"time", "seconds", "host"} & set(" ".join(results).split())


def test_the_best_folder_stands_alone(tmp_path, machine, make):
    fit(make("lm"), tmp_path / "run", machine)
    (tmp_path / "run" / "best").rename(tmp_path / "elsewhere")
    model = oelm.load(tmp_path / "elsewhere")
    tokenizer = Tokenizer.load_from(tmp_path / "elsewhere")
    assert isinstance(model, GPT)
    assert oelm.audit(model).ok
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt-cls", "bert", "t5-cls", "bart-cls"])
def test_classification_runs(tmp_path, machine, make, shape):
    config = make(shape, budget={"accumulation": 2, "steps": 0, "epochs": 2, "eval_every": 0})
    assert fit(config, tmp_path, machine).state == "finished"
    folder = RunFolder(tmp_path)
    results, predictions = folder.results(), folder.predictions()
    assert results["metric"] == "accuracy"
    assert results["steps"] == 10  # 2 epochs of 40 rows, 8 rows per step
    right = [a == b for a, b in zip(predictions["labels"], predictions["predicted"], strict=True)]
    assert results["test"]["accuracy"] == sum(right) / len(right)
    assert results["test"]["n"] == len(right) == 6
    assert [r["step"] for r in rows(tmp_path, "validation")] == [5, 10]  # once per epoch


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["t5", "bart"])
def test_denoising_runs(tmp_path, machine, make, shape):
    assert fit(make(shape), tmp_path, machine).state == "finished"
    assert RunFolder(tmp_path).results()["test"]["ppl"] > 1


@pytest.mark.parametrize("shape", ["lm", "gpt-cls"])
def test_two_by_eight_is_one_by_sixteen(tmp_path, machine, make, shape):
    losses = []
    for batch, accumulation in ((8, 2), (16, 1)):
        budget = {"batch_size": batch, "accumulation": accumulation, "steps": 6, "log_every": 1}
        config = make(shape, model={"dropout": 0.0}, budget=budget)
        fit(config, tmp_path / str(batch), machine)
        losses.append([r["loss"] for r in rows(tmp_path / str(batch), "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_folder_of_another_config_is_refused_with_the_diff(tmp_path, machine, make):
    fit(make("lm", budget={"steps": 2}), tmp_path, machine)
    before = (tmp_path / "status.json").read_bytes()
    with pytest.raises(UsageError, match=r"budget\.steps: 2 -> 3"):
        fit(make("lm", budget={"steps": 3}), tmp_path, machine)
    assert (tmp_path / "status.json").read_bytes() == before


def test_finished_run_is_left_alone(tmp_path, machine, make):
    config = make("lm", budget={"steps": 2})
    fit(config, tmp_path, machine)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "finished"
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_tuning_trial_never_sees_the_test_split(tmp_path, machine, make, monkeypatch):
    asked = []
    original = LanguageModelling.eval_batches

    def watched(self, split, rows):
        asked.append(split)
        return original(self, split, rows)

    monkeypatch.setattr(LanguageModelling, "eval_batches", watched)
    fit(make("lm", tune={"trial": True}), tmp_path, machine)
    folder = RunFolder(tmp_path)
    assert folder.results()["test"] is None
    assert folder.results()["validation"]["loss"] > 0
    assert set(asked) == {"validation"}
    assert "test" not in folder.manifest()["data"]["fingerprints"]


def test_early_stop(tmp_path, machine, make):
    config = make("lm", optim={"lr": 1e-30}, budget={"steps": 40, "eval_every": 2, "patience": 2})
    fit(config, tmp_path, machine)
    results = RunFolder(tmp_path).results()
    assert results["steps"] == 6  # one best, two without improvement
    assert results["stopped_early"]
    assert "stopped early" in rows(tmp_path, "event")[0]["text"]


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-early"])
def test_schedules_act_at_their_steps(tmp_path, machine, make, name):
    config = make("lm", name, budget={"steps": 20})
    assert fit(config, tmp_path, machine).state == "finished"
    steps = [row["step"] for row in rows(tmp_path, "event")]
    method = config.method
    if name == "oelm-early":
        expected = [math.ceil(method.freeze_at * 20) + 1]
    else:
        expected = [math.ceil(share * 20) + 1 for share in (method.thaw_from, method.thaw_to)]
    assert steps == expected
    counts = RunFolder(tmp_path).results()["parameters"]
    assert counts["qk_trainable"] == counts["qk_total"]  # they trained at some time


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_as_diverged(tmp_path, machine, make, monkeypatch, bad):
    original, calls = LanguageModelling.loss, []

    def loss(self, model, tensors):
        calls.append(model.training)
        factor = bad if calls.count(True) == 6 else 1.0
        return original(self, model, tensors) * factor

    monkeypatch.setattr(LanguageModelling, "loss", loss)
    outcome = fit(make("lm"), tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("diverged", 76)
    assert "at step 6; the last finite loss was 5." in outcome.reason
    assert RunFolder(tmp_path).status().reason == outcome.reason
    assert RunFolder(tmp_path).results() is None
    assert load_checkpoint(tmp_path / "latest.pt")["progress"]["step"] == 4
    assert fit(make("lm"), tmp_path, machine).state == "diverged"  # and is not tried again for nothing


def test_an_exploding_loss_stops_as_diverged(tmp_path, machine, make):
    config = make("lm", "baseline", optim={"lr": 30.0, "warmup_steps": 0, "clip": 0.0}, budget={"steps": 100})
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "diverged"


class Memory:
    """A machine on which more than `most` rows at once do not fit."""

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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "cpu"],
)
def test_out_of_memory_halves_the_micro_batch_only(tmp_path, machine, make, monkeypatch, error):
    config = make("gpt-cls", model={"dropout": 0.0}, budget={"batch_size": 8, "log_every": 1})
    fit(config, tmp_path / "roomy", machine)
    memory = Memory(3, error)
    monkeypatch.setattr(Classification, "loss", memory.watch(Classification.loss))
    assert fit(config, tmp_path / "tight", machine).state == "finished"
    assert max(memory.seen) == 2
    texts = [row["text"] for row in rows(tmp_path / "tight", "event")]
    assert [t for t in texts if "micro-batches now have" in t] == [
        "out of memory: micro-batches now have 4 rows, a step as many as before",
        "out of memory: micro-batches now have 2 rows, a step as many as before",
    ]
    assert load_checkpoint(tmp_path / "tight" / "latest.pt")["progress"]["split"] == 4
    roomy, tight = (rows(tmp_path / name, "train") for name in ("roomy", "tight"))
    assert [r["tokens"] for r in roomy] == [r["tokens"] for r in tight]
    assert [r["loss"] for r in roomy] == pytest.approx([r["loss"] for r in tight], rel=1e-4)


def test_memory_that_never_suffices_is_its_own_state(tmp_path, machine, make, monkeypatch):
    memory = Memory(0, MemoryError())
    monkeypatch.setattr(LanguageModelling, "loss", memory.watch(LanguageModelling.loss))
    outcome = fit(make("lm"), tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("oom", 1)
    assert RunFolder(tmp_path).status().state == "oom"


def test_signal_in_training_asks_to_be_continued(tmp_path, machine, make, monkeypatch):
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


def test_time_limit_makes_progress_each_time(tmp_path, machine, make):
    config, hurried = make("lm", budget={"steps": 4}), replace(machine, time_limit=1e-6)
    outcomes = [fit(config, tmp_path, hurried).state for _ in range(4)]
    assert outcomes[0] == "interrupted"
    steps = RunFolder(tmp_path).status().step
    assert steps >= 3
    assert fit(config, tmp_path, machine).state == "finished"


def test_full_disk_stops_cleanly(tmp_path, machine, make, monkeypatch):
    original, written = _HashingWriter.finish, []

    def finish(self):
        written.append(1)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self)

    monkeypatch.setattr(_HashingWriter, "finish", finish)
    outcome = fit(make("lm"), tmp_path, machine)
    assert outcome.state == "failed"
    assert "disk full" in outcome.reason
    assert "disk full" in RunFolder(tmp_path).status().reason
    assert load_checkpoint(tmp_path / "latest.pt")["progress"]["step"] == 4
    monkeypatch.undo()
    assert fit(make("lm"), tmp_path, machine).state == "finished"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_really_full_disk(tmp_path, machine, make):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", disk], check=False).returncode:
        pytest.skip("no right to mount here")
    try:
        config = make("lm", data={"tokenizer": "bpe-600"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(setup, "require_disk", lambda plan, folder: None)  # somebody else filled it later
            outcome = fit(config, disk / "run", machine)
        assert outcome.state == "failed"
        assert "disk full" in outcome.reason
        assert load_checkpoint(disk / "run" / "latest.pt")["progress"]["step"] >= 4
        (disk / "run" / "training.log").read_text()
        refused = fit(config, disk / "other", machine)
        assert refused.state == "failed"
        assert "disk full: this run needs" in refused.reason
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": {"batch_size": 0}}, "batch_size must be at least 1"),
        ({"budget": {"steps": 0}}, "say how long to train"),
        ({"optim": {"lr": 0.0}}, r"optim\.lr must be positive"),
        ({"model": {"name": "smok"}}, "did you mean 'smoke'"),
        ({"model": {"pretrained": True}}, "pretrained is for transformers models"),
        ({"model": {"family": "hf", "name": "tiny-bert"}}, "task lm trains our GPT"),
        ({"data": {"dataset": "storys"}}, "did you mean 'stories'"),
        ({"data": {"dataset": "stories-2way"}}, "is for classification"),
        ({"data": {"max_length": 0}}, "max_length must be at least 1"),
        ({"data": {"tokenizer": "bpe-many"}}, "a vocabulary size is expected"),
    ],
)
def test_bad_wishes_are_errors_before_anything_runs(tmp_path, machine, make, changes, message):
    with pytest.raises(UsageError, match=message):
        fit(make("lm", **changes), tmp_path, machine)
    assert RunFolder(tmp_path).status().state == "failed"


def test_missing_tokenizer_is_a_named_failure(tmp_path, machine, make, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = fit(make("lm", data={"tokenizer": "no-such-tokenizer"}), tmp_path, machine)
    assert outcome.state == "failed"
    assert "no-such-tokenizer" in outcome.reason


def test_a_fault_of_the_program_is_recorded_and_raised(tmp_path, machine, make, monkeypatch):
    def broken(self, model, tensors):
        raise KeyError("surprise")

    monkeypatch.setattr(LanguageModelling, "loss", broken)
    with pytest.raises(KeyError):
        fit(make("lm"), tmp_path, machine)
    assert RunFolder(tmp_path).status().state == "failed"
    assert "surprise" in RunFolder(tmp_path).log_file.read_text()


def test_a_broken_freeze_fails_the_audit(tmp_path, machine, make, monkeypatch):
    from oelm.training.run import Run

    original = Run.audit

    def tampered(run, when):
        if when == "end":
            with torch.no_grad():
                run.model.blocks[0].attn.q.weight.mul_(1.01)
        original(run, when)

    monkeypatch.setattr(Run, "audit", tampered)
    outcome = fit(make("lm"), tmp_path, machine)
    assert outcome.state == "failed"
    assert "its bytes changed since it was frozen" in outcome.reason


def test_tensorboard_gets_the_rows_and_missing_trackers_are_named(tmp_path, machine, make):
    pytest.importorskip("tensorboard")
    fit(make("lm"), tmp_path / "run", replace(machine, trackers=("tensorboard",)))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [3, 6, 9, 12]
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        fit(make("lm"), tmp_path / "typo", replace(machine, trackers=("tensorbord",)))


def test_global_random_state_is_the_callers(tmp_path, machine, make):
    before = torch.get_rng_state()
    fit(make("lm", budget={"steps": 2}), tmp_path, machine)
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_differ_and_repeat(tmp_path, machine, make):
    base = make("lm", budget={"steps": 3, "log_every": 1})
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(replace(base, seed=seed), tmp_path / name, machine)
    a, b, c = ((tmp_path / n / "metrics.jsonl").read_bytes() for n in "abc")
    assert a == b != c
    assert json.loads((tmp_path / "a" / "results.json").read_text())["seed"] == 1
