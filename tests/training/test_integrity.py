"""Damage to the files of a run is detected, reported and repaired if possible; it never affects a verdict."""

from __future__ import annotations

import builtins
import errno
import json
import math
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_checks import assert_same_run, flip_bits, stop_after

from oelm.analysis.load import load_runs
from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError, UsageError
from oelm.experiments.launch.worker import train_folder
from oelm.experiments.tuning import validation_loss
from oelm.runs.archives.archive import pack
from oelm.runs.archives.keep import keep
from oelm.runs.archives.merge import merge
from oelm.runs.disk import free, freeable
from oelm.runs.folder import RunFolder
from oelm.runs.layout import VERDICT_FILES, run_path
from oelm.runs.scan import scan, state_of
from oelm.runs.schema import Status
from oelm.training import loop
from oelm.training.fit import fit
from oelm.training.tasks.lm import LanguageModelling

FILES = tuple(name for name in VERDICT_FILES if name != "test_losses.json")  # those of a classifier


def short(make, shape="lm", **changes):
    budget = {"steps": 4, "eval_every": 2, "log_every": 1, **changes.pop("budget", {})}
    return make(shape, data={"eval_rows": 2}, budget=budget, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, machine, make) -> Path:
    """A runs folder with one finished classification run; copy it before damaging it."""
    root = tmp_path_factory.mktemp("finished")
    config = short(make, "gpt-cls")
    assert fit(config, run_path(root, config), machine).state == "finished"
    return root


@pytest.fixture
def runs(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, machine, make) -> tuple[Path, Path]:
    """(folder of a run that was stopped after step 3, folder of the same run without a stop)."""
    root = tmp_path_factory.mktemp("stopped")
    config = short(make, budget={"checkpoint_every": 1})
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        assert fit(config, root / "stopped", machine).state == "interrupted"
    assert fit(config, root / "uninterrupted", machine).state == "finished"
    return root / "stopped", root / "uninterrupted"


def only_run(root: Path) -> Path:
    (run,) = scan(root)
    return run.path


# -- checksums ------------------------------------------------------------------------------------


def test_a_finished_run_is_verified(runs):
    folder = RunFolder(only_run(runs))
    assert folder.damage() == {}
    listed = json.loads((folder.path / "checksums.json").read_text(encoding="utf-8"))["files"]
    assert set(listed) == set(FILES)
    loaded = load_runs(runs)
    assert loaded.warnings == []


@pytest.mark.parametrize("name", [*FILES, "checksums.json"])
def test_any_changed_byte_keeps_a_run_out_of_the_comparisons(runs, name):
    path, random_number = only_run(runs) / name, random.Random(name)
    content = path.read_bytes()
    for _ in range(20):
        flip_bits(path, random_number.randrange(len(content)), 1 << random_number.randrange(8))
        loaded = load_runs(runs)
        assert [run for run in loaded.runs if run.result is not None] == []
        assert str(path.parent) in str(loaded.warnings[0])
        path.write_bytes(content)
    path.unlink()
    loaded = load_runs(runs)
    assert [run for run in loaded.runs if run.result is not None] == []
    assert str(path.parent) in str(loaded.warnings[0])


def test_a_perplexity_that_is_not_the_exponential_of_its_loss_is_refused(tmp_path, stopped):
    folder = run_path(tmp_path, RunFolder(stopped[1]).config())
    shutil.copytree(stopped[1], folder)
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    content["test"]["ppl"] += 1
    (folder / "results.json").write_text(json.dumps(content), encoding="utf-8")
    RunFolder(folder).write_checksums()
    assert "test.ppl is" in " ".join(map(str, load_runs(tmp_path).warnings))


def test_merged_runs_carry_their_checksums_and_damaged_runs_are_not_kept(runs, tmp_path):
    pack(runs, tmp_path / "runs.tar.gz")
    merge(tmp_path / "runs.tar.gz", tmp_path / "merged")
    assert load_runs(tmp_path / "merged").warnings == []
    flip_bits(only_run(tmp_path / "merged") / "results.json", 300, 1)
    assert [run.result for run in load_runs(tmp_path / "merged").runs] == [None]
    flip_bits(only_run(runs) / "metrics.jsonl", 30, 1)
    with pytest.raises(OelmError, match=r"metrics\.jsonl has changed"):
        keep(runs, tmp_path / "kept")


def test_a_learning_rate_is_not_chosen_from_a_damaged_trial(tmp_path, machine, make):
    trial = short(make, tune={"trial": True})
    folder = run_path(tmp_path, trial)
    assert fit(trial, folder, machine).state == "finished"
    assert validation_loss(folder) > 0
    content = (folder / "results.json").read_text(encoding="utf-8")
    (folder / "results.json").write_text(content.replace('"step": 4', '"step": 5'), encoding="utf-8")
    with pytest.raises(OelmError, match=r"results\.json has changed"):
        validation_loss(folder)


# -- finished runs with damage ---------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_finished_run_without_its_results_keeps_its_checkpoints_and_is_completed(
    runs, finished, machine, damage
):
    folder = RunFolder(only_run(runs))
    assert len(freeable(runs)) == 1
    listed = freeable(runs)
    folder.results_file.unlink() if damage == "gone" else flip_bits(folder.results_file, 300, 1)
    assert free(listed) == 0
    assert freeable(runs) == []
    assert state_of(folder.path, verify=True)[0] in ("interrupted", "broken")
    assert (
        "results.json" in state_of(folder.path, verify=True)[1].reason + state_of(folder.path, verify=True)[2]
    )
    assert train_folder(folder.path, machine, keep_checkpoints=True) == 0
    assert state_of(folder.path, verify=True)[0] == "finished"
    assert_same_run(only_run(finished), folder.path)
    assert free(freeable(runs)) > 0
    flip_bits(folder.results_file, 300, 1)  # without a checkpoint, the run trains again from its first step
    assert train_folder(folder.path, machine, keep_checkpoints=True) == 0
    assert_same_run(only_run(finished), folder.path)


@pytest.mark.parametrize(("state", "trial"), [(s, t) for s in ("finished", "diverged") for t in (0, 1)])
def test_a_worker_deletes_what_nothing_reads_after_the_run(
    tmp_path, machine, make, monkeypatch, state, trial
):
    config = short(make, tune={"trial": bool(trial)})
    folder = RunFolder(run_path(tmp_path, config))
    folder.claim(config)
    original, steps = LanguageModelling.loss, []

    def loss(self, model, tensors):
        steps.append(model.training)
        return original(self, model, tensors) * (math.nan if steps.count(True) == 4 else 1.0)

    if state == "diverged":
        monkeypatch.setattr(LanguageModelling, "loss", loss)
    train_folder(folder.path, machine)
    assert folder.status().state == state
    assert (folder.results() is None) == (state == "diverged")
    assert folder.best.exists() == (not trial)
    assert folder.resumable == (state == "diverged" and not trial)  # `oelm run --retry-diverged` continues it
    assert freeable(tmp_path) == []
    train_folder(folder.path, machine)
    assert folder.status().state == state


@pytest.mark.parametrize("trial", [False, True])
def test_what_a_kill_leaves_of_a_finished_run_is_found_by_clean(tmp_path, machine, make, trial):
    config = short(make, tune={"trial": trial})
    folder = RunFolder(run_path(tmp_path, config))
    assert fit(config, folder.path, machine).state == "finished"  # as if killed before the files are deleted
    assert free(freeable(tmp_path)) > 0
    assert (folder.resumable, folder.best.exists()) == (False, not trial)
    assert folder.ended().state == "finished"


def test_another_seed_or_config_is_refused_before_the_first_step(stopped, tmp_path, machine):
    folder = RunFolder(shutil.copytree(stopped[0], tmp_path / "run"))
    other = replace(folder.config(), seed=7)
    rows = folder.metrics_file.read_bytes()
    with pytest.raises(UsageError, match="seed: 42 -> 7"):
        fit(other, folder.path, machine)
    folder.config_file.write_text(config_to_yaml(other), encoding="utf-8")  # edited by hand
    outcome = fit(other, folder.path, machine)
    assert outcome.state == "failed"
    assert "was written with a different config" in outcome.reason
    assert folder.metrics_file.read_bytes() == rows


# -- damaged files --------------------------------------------------------------------------------

GARBAGE = {
    "not UTF-8": b"\xff\xfe\x00",
    "cut off": b'{"state": "runn',
    "a list": b"[]",
    "empty": b"",
    "wrong types": b'{"state": "running", "attempt": "x", "total_wall_time": "y", "data": [], "start": 3}',
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_files_that_can_be_rebuilt_do_not_block_a_resume(stopped, tmp_path, machine, garbage):
    folder = RunFolder(shutil.copytree(stopped[0], tmp_path / "run"))
    for name in ("timing_stats.json", "freeze_audit.json", "manifest.json", "status.json"):
        (folder.path / name).write_bytes(GARBAGE[garbage])
    for name in ("step_times.bin", "step_memory.bin", "split.json", "attempts.jsonl"):
        (folder.path / name).write_bytes(b"\xff" * 70)
    assert fit(folder.config(), folder.path, machine).state == "finished"
    assert_same_run(stopped[1], folder.path)
    assert folder.manifest().data.fingerprints
    assert folder.status().state == "finished"
    assert folder.damage() == {}


def test_files_damaged_during_a_run_are_written_again(stopped, tmp_path, machine, monkeypatch):
    folder = RunFolder(shutil.copytree(stopped[0], tmp_path / "run"))
    config, load_best = folder.config(), loop.load_best
    manifest = folder.manifest()

    def damaged(run):
        folder.config_file.write_text(
            folder.config_file.read_text(encoding="utf-8").replace("lr: 0.003", "lr: 0.004"), encoding="utf-8"
        )
        folder.manifest_file.write_bytes(b"{")
        load_best(run)

    monkeypatch.setattr(loop, "load_best", damaged)
    assert fit(config, folder.path, machine).state == "finished"
    assert folder.config() == config
    assert folder.manifest() == manifest


def test_metrics_damaged_during_a_run_are_detected(stopped, tmp_path, machine, monkeypatch):
    folder, load_best = RunFolder(shutil.copytree(stopped[0], tmp_path / "run")), loop.load_best

    def damaged(run):
        flip_bits(folder.metrics_file, 30, 1)
        load_best(run)

    monkeypatch.setattr(loop, "load_best", damaged)
    outcome = fit(folder.config(), folder.path, machine)
    assert outcome.state == "failed"
    assert "metrics.jsonl were changed" in outcome.reason
    assert folder.results() is None


# -- full disks, moved folders, leftovers ---------------------------------------------------------


class FullDisk:
    """Raises "no space left" from the n-th operation on that needs space in `folder`."""

    def __init__(self, folder: Path, calls: int) -> None:
        self.folder, self.left = str(folder), calls
        self.open, self.fsync, self.link, self.mkdir = builtins.open, os.fsync, os.link, os.mkdir

    def install(self, patch) -> None:
        patch.setattr(builtins, "open", self.opened)
        patch.setattr(os, "fsync", lambda file: self.spend() or self.fsync(file))
        patch.setattr(os, "link", lambda *args: self.spend() or self.link(*args))
        patch.setattr(os, "mkdir", lambda path, *a, **k: self.at(path) or self.mkdir(path, *a, **k))

    def opened(self, file, mode="r", *args, **options):
        if set(mode) & set("wax+"):
            self.at(file)
        return self.open(file, mode, *args, **options)

    def at(self, path) -> None:
        if isinstance(path, str | os.PathLike) and str(path).startswith(self.folder):
            self.spend()

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def operations_of_a_run(config, folder, machine) -> int:
    disk = FullDisk(folder, sys.maxsize)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        assert fit(config, folder, machine).state == "finished"
    return sys.maxsize - disk.left


def exit_code_of(config, folder, machine) -> int:
    try:
        return fit(config, folder, machine).exit_code
    except OelmError as error:  # not even a config.yaml could be written
        return error.exit_code


def test_a_disk_that_fills_up_at_any_moment_leaves_an_interrupted_run(tmp_path, machine, make):
    config = short(make, budget={"steps": 2, "eval_every": 1})
    total = operations_of_a_run(config, tmp_path / "uninterrupted", machine)
    moments = sorted({0, 2, *random.Random(0).sample(range(3, total), 4)})
    for at in moments:
        folder = RunFolder(tmp_path / f"at-{at}")
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(folder.path, at).install(patch)
            code = exit_code_of(config, folder.path, machine)
        assert code == 75 or (code == 0 and folder.ended()), at  # full only after the last file was written
        status = folder.status()
        if status is not None and code:
            assert (status.state, "disk full" in status.reason) == ("interrupted", True), at
        assert [p.name for p in folder.path.glob(".*")] == []
        assert fit(config, folder.path, machine).state == "finished"
        assert_same_run(tmp_path / "uninterrupted", folder.path)


def test_a_worker_on_a_full_disk_ends_with_75_and_no_traceback(tmp_path, machine, make, capsys):
    config = short(make)
    folder = RunFolder(tmp_path / "run")
    folder.claim(config)
    folder.write_status(Status())
    for calls in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            FullDisk(folder.path, calls).install(patch)
            assert train_folder(folder.path, machine) == 75
        assert folder.status().state == "interrupted"
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_that_is_moved_away_is_an_interrupted_run_at_its_new_place(
    tmp_path, machine, make, monkeypatch
):
    config, original, calls = short(make), LanguageModelling.loss, []

    def loss(task, model, tensors):
        calls.append(1)
        if len(calls) == 3:
            (tmp_path / "run").rename(tmp_path / "moved")
        return original(task, model, tensors)

    monkeypatch.setattr(LanguageModelling, "loss", loss)
    outcome = fit(config, tmp_path / "run", machine)
    assert (outcome.state, outcome.exit_code) == ("interrupted", 75)
    assert "was moved or deleted" in outcome.reason
    assert RunFolder(tmp_path / "moved").status().state == "interrupted"
    assert not (tmp_path / "run").exists()
    assert fit(config, tmp_path / "moved", machine).state == "finished"


def test_temporary_files_of_killed_writers_are_removed_at_the_next_start(stopped, tmp_path, machine):
    folder = RunFolder(shutil.copytree(stopped[0], tmp_path / "run"))
    gone = 2**22 - 1 if not Path(f"/proc/{2**22 - 1}").exists() else 2**22 - 2
    for name in (f".previous.pt.{gone}.tmp", f".results.json.{gone}.tmp", f".status.json.{os.getpid()}.tmp"):
        (folder.path / name).write_text("half", encoding="utf-8")
    (folder.path / f".config.yaml.{os.getppid()}.tmp").write_text(
        "of a process that exists", encoding="utf-8"
    )
    assert fit(folder.config(), folder.path, machine).state == "finished"
    assert [p.name for p in folder.path.glob(".*.tmp")] == [f".config.yaml.{os.getppid()}.tmp"]
