"""metrics.jsonl and training.log."""

from __future__ import annotations

import errno
import io
import math
import shutil
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from oelm.errors import OelmError
from oelm.runs.folder import RunFolder
from oelm.training.logs import recorder
from oelm.training.logs.journal import Journal
from oelm.training.logs.manifest import base_manifest, git_commit
from oelm.training.logs.metrics import MetricsLog, metrics_problem

CPU = torch.device("cpu")


class Recorder:
    def __init__(self):
        self.rows = []

    def log(self, step, values):
        self.rows.append((step, values))

    def close(self):
        self.rows.append("closed")


def test_metrics_are_truncated_to_the_checkpoint(tmp_path):
    path, tracker = tmp_path / "metrics.jsonl", Recorder()
    log = MetricsLog(path, trackers=[tracker])
    log.row(1, "train", loss=2.0)
    offset, sha256 = log.sync()
    assert metrics_problem(path, offset, sha256) == ""
    log.row(2, "train", loss=1.5, note="x")
    log.row(2, "event", text="unfrozen")
    log.close()
    assert tracker.rows == [(1, {"train/loss": 2.0}), (2, {"train/loss": 1.5}), "closed"]
    again = MetricsLog(path, offset=offset)
    again.row(2, "train", loss=1.25)
    again.close()
    assert path.read_text(encoding="utf-8") == (
        '{"step": 1, "kind": "train", "loss": 2.0}\n{"step": 2, "kind": "train", "loss": 1.25}\n'
    )
    with pytest.raises(OelmError, match="shorter than the 1000000 bytes"):
        MetricsLog(path, offset=10**6)


def test_metrics_refuse_nan(tmp_path):
    log = MetricsLog(tmp_path / "m")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.row(1, "train", loss=math.nan)
    log.close()


def test_a_terminal_that_vanishes_does_not_stop_the_log(tmp_path, monkeypatch):
    """As after an ssh session, when the run still has to write its checkpoint."""

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    journal = Journal(tmp_path / "log", show=True)
    for step in range(2):
        journal.line(f"step {step}")
        journal.progress(step, 2, "")
    journal.close()
    assert [line.split()[-1] for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()] == [
        "0",
        "1",
    ]


def test_without_a_terminal_lines_are_printed_at_once_and_the_progress_every_30_seconds(
    tmp_path, monkeypatch, capsys
):
    now = [1000.0]
    monkeypatch.setattr("oelm.training.logs.journal.time.monotonic", lambda: now[0])
    journal = Journal(tmp_path / "log", echo="stdout")
    journal.line("step 1/9  validation loss 2")
    for step in range(2, 9):
        now[0] += 10
        journal.progress(step, 9, "0.10 steps/s")
    journal.line("finished", show=False)
    journal.close()
    printed = [line.split(maxsplit=2)[2] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["step 1/9  validation loss 2", "step 4/9  0.10 steps/s", "step 7/9  0.10 steps/s"]
    assert [line.split(maxsplit=2)[2] for line in (tmp_path / "log").read_text("utf-8").splitlines()] == [
        "step 1/9  validation loss 2",
        "finished",
    ]


def test_a_manifest_names_the_data_folder_that_only_the_environment_knows(monkeypatch):
    monkeypatch.setenv("OELM_DATA_DIR", "my data")
    assert (
        base_manifest("", "/somewhere/bin/oelm run GPT-01").command
        == "OELM_DATA_DIR='my data' oelm run GPT-01"
    )
    typed = "oelm run GPT-01 --data-dir other"
    assert base_manifest("", typed).command == typed
    assert base_manifest("", "/src/oelm/__main__.py run GPT-01").command.endswith("oelm run GPT-01")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_says_whether_source_code_has_uncommitted_changes(tmp_path):
    def git(*words):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert git_commit(tmp_path) is None
    for name in ("src/a.py", "benchmarks/results/a.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "benchmarks/results/a.json").write_text("2")
    (tmp_path / "src/new.py").write_text("2")  # not tracked
    commit = git_commit(tmp_path / "src")
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "src/a.py").write_text("2")
    assert git_commit(tmp_path / "src") == f"{commit}-dirty"


def test_a_clock_that_is_set_back_does_not_stop_the_heartbeat(tmp_path, monkeypatch):
    world = SimpleNamespace(is_main=True, device=CPU)
    writer = recorder.Recorder(RunFolder(tmp_path), world, title="run")
    monkeypatch.setattr(recorder, "_STATUS_SECONDS", 0)
    assert writer.status_is_due
    writer.write_status(state="running")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert writer.status_is_due
