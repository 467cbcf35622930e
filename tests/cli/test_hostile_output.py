"""Text from files, folder names and the environment is escaped before it is printed."""

from __future__ import annotations

import ast
import io
import json
import os
import time
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

import oelm.cli
from oelm.cli import progress
from oelm.cli.main import main
from oelm.cli.monitor import View
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import Job
from oelm.printable import printable, printable_json
from oelm.runs.scan import scan
from oelm.runs.schema import Status
from oelm.training.logs.journal import Journal

HOSTILE = "[/b][bold]\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\x00\r"
TERMINAL_CONTROLS = {"\x1b", "\x07", "\x9b", "\x00", "\r", "\u202e"}


@given(st.text(alphabet=st.characters(codec=None)))
def test_printable_text_has_no_control_characters_and_can_be_encoded(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Zl", "Zp")]
    assert not {"\u202a", "\u202b", "\u202d", "\u202e", "\u2066", "\u2067", "\u2068"} & set(shown)
    assert printable(shown) == shown
    assert json.loads(printable_json(json.dumps(text, ensure_ascii=False))) == text


def test_ordinary_text_is_not_changed() -> None:
    text = "Überraschung: 冻结 [oelm-freeze] 5 % 👩‍👩‍👧 a\\b"
    assert printable(text) == text
    assert printable("two\n\tlines", lines=True) == "two\n\tlines"


@pytest.fixture
def hostile_runs(tmp_path: Path) -> Path:
    """Return a runs folder with two runs: one has hostile texts everywhere, one a name not in UTF-8."""
    for id in (HOSTILE.replace("\x00", ""), os.fsdecode(b"caf\xe9")):
        place = tmp_path / "runs" / "stu[b]dy\x1b[1m" / id.replace("/", "") / "scale=mini" / "seed=0"
        place.mkdir(parents=True)
        (place / "config.yaml").write_text("id: '[/b]'\n", encoding="utf-8")
        status = {"state": "failed", "heartbeat": time.time(), "reason": HOSTILE, "step": 1, "total_steps": 9}
        (place / "status.json").write_text(json.dumps(status), encoding="utf-8")
        (place / "training.log").write_bytes(f"start {HOSTILE}\n".encode() + b"\xff\xfe\n")
    return tmp_path / "runs"


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["monitor", "--once"], ["analyze"]])
def test_commands_escape_a_hostile_runs_folder(
    words: list[str], hostile_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "--runs", str(hostile_runs)])
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "Traceback" not in shown
    assert not TERMINAL_CONTROLS & set(shown)
    shown.encode()
    if words != ["analyze"]:
        assert "[/b][bold]" in shown  # rich markup is shown as text, not interpreted


def test_monitor_on_a_terminal_draws_markup_as_text(hostile_runs: Path) -> None:
    view = View(hostile_runs)
    view.update(scan(hostile_runs))
    screen = io.StringIO()
    Console(width=200, height=30, file=screen, force_terminal=True).print(view.draw(200, 30))
    assert "[/b][bold]" in screen.getvalue()
    assert not {"\x07", "\x9b", "\u202e"} & set(screen.getvalue())
    assert "\x1b]0;" not in screen.getvalue()


def test_progress_of_a_launch_draws_markup_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(experiment("GPT-01").at("smoke", 0), id="GPT[/b]\x1b[2J")
    job = Job(config, tmp_path, state="running", slot="[/x]", reason="first\nsecond\x1b[2J")
    status = Status(total_steps=9, heartbeat=time.time())
    monkeypatch.setattr(progress, "state_of", lambda folder: ("running", status, ""))
    progress.RunProgress(1).changed(job)
    assert capsys.readouterr().out.count("\n") == 1
    screen = io.StringIO()
    table = progress.RunProgress(1)
    table.live = Live(console=Console(file=screen, force_terminal=True, width=200), auto_refresh=False)
    table.last = -1000.0
    with table.live:
        table.tick([job])
    assert "GPT[/b]" in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_the_training_log_escapes_hostile_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "training.log", title="[/b]\x1b[2J", show=True)
    journal.line(HOSTILE)
    journal.progress(1, 2, "[/c]\x1b[2J")
    journal.close()
    written = (tmp_path / "training.log").read_text(encoding="utf-8")
    assert "[/b][bold]" in written
    assert not TERMINAL_CONTROLS & set(written)
    assert not {"\x07", "\x9b", "\x1b]0;"} & set(capsys.readouterr().err)


def test_an_error_escapes_the_name_of_a_hostile_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OELM_RUNS", str(tmp_path / "\x1b[2J"))
    assert main(["analyze"]) == 2
    assert main(["generate", str(tmp_path / "\x1b[2J"), "--prompt", "x"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_every_command_uses_the_print_that_escapes() -> None:
    """Every module that calls print() imports oelm.cli.output.print, or calls printable() on its text."""
    for path in Path(oelm.cli.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        bare = [n for n in calls if n.func.id == "print" and "printable(" not in ast.unparse(n)]
        names = [
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "oelm.cli.output"
            for alias in node.names
        ]
        assert not bare or "print" in names or path.name == "output.py", path.name
