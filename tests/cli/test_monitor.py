"""`oelm monitor`: the columns that fit on the screen, the keys, and a session in a pseudo-terminal."""

from __future__ import annotations

import contextlib
import io
import pty
import select
import subprocess
import sys
import time
from dataclasses import replace
from os import close, environ, getpid, read, write
from pathlib import Path
from socket import gethostname

import pytest
from rich.console import Console

from oelm.cli.monitor import View
from oelm.files.atomic import write_json
from oelm.runs.folder import RunFolder
from oelm.runs.progress import DecideProgress, write_decide_progress
from oelm.runs.scan import RunInfo, scan
from oelm.runs.schema import Status


@pytest.fixture(scope="module")
def diverged_runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunInfo]:
    root = tmp_path_factory.mktemp("runs")
    status = Status(
        state="diverged", step=123_456, total_steps=200_000, loss=3.25, reason="loss is nan" + 300 * "!"
    )
    for seed in range(60):
        folder = RunFolder(root / "gap" / "GAP-TS-oelm-freeze" / "scale=full" / f"seed={seed}")
        folder.path.mkdir(parents=True)
        folder.write_status(status)
    return scan(root)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_monitor_leaves_out_columns_and_never_truncates_a_name(
    width: int, diverged_runs: list[RunInfo]
) -> None:
    view = View("runs")
    view.update(diverged_runs)
    screen = io.StringIO()
    Console(width=width, height=24, file=screen).print(view.draw(width, 24))
    lines = screen.getvalue().splitlines()
    assert len(lines) <= 24
    assert "DIVERGED" in lines[2]
    assert "123456/200000" in lines[2]
    assert "loss is nan" in lines[2]
    assert "GAP-TS-oelm-freeze full seed 0 " in lines[2]  # a truncated name would be ambiguous
    assert ("steps/s" in lines[1]) == (width == 200)


def test_monitor_tells_how_far_data_tuning_runs_and_questions_are(tmp_path: Path) -> None:
    place = tmp_path / "gap" / "GAP-TS-oelm-freeze" / "scale=full"
    live = Status(state="running", pid=getpid(), host=gethostname(), heartbeat=time.time())
    statuses = {
        "seed=0": replace(live, preparing="train 42%"),
        "seed=1": replace(live, step=50, total_steps=100, steps_per_second=1.0, eta_seconds=50.0),
        "seed=2": Status(state="diverged"),
        "tune/lr=0.001/seed=1000": Status(state="diverged"),
        "tune/lr=0.002/seed=1000": Status(state="interrupted", step=60, total_steps=100),
    }
    for name, status in statuses.items():
        (place / name).mkdir(parents=True)
        folder = RunFolder(place / name)
        folder.write(status)  # write_status() would enter another process and time
    write_decide_progress(tmp_path / "gap", DecideProgress(questions=6, decided=2, open=3))
    view = View(tmp_path)
    view.update(scan(tmp_path))
    screen = io.StringIO()
    Console(width=200, height=24, file=screen).print(view.draw(200, 24))
    lines = screen.getvalue().splitlines()
    assert lines[1].rstrip() == (
        "gap: preparing data: train 42%; tuning: 1 of 2 trials ended; runs: 1 of 3 ended; "
        "2 of 6 questions decided, 1 given up, 3 open; about 50.0 s left"
    )
    assert any("data train 42%" in line for line in lines[2:])
    (tmp_path / "gap" / ".decide.json").write_text("{damaged", encoding="utf-8")
    assert "questions" not in view.studies()[0]


def test_monitor_keys_move_by_lines_by_pages_and_to_the_ends(tmp_path: Path) -> None:
    for seed in range(30):
        place = tmp_path / "s" / "X" / "scale=full" / f"seed={seed}"
        place.mkdir(parents=True)
        RunFolder(place).write_status(Status(state="finished"))
        RunFolder(place).results_file.write_text("{}", encoding="utf-8")
    view = View(tmp_path)
    view.update(scan(tmp_path))
    places = []
    for key in ("j", "\x1b[6~", "G", "j", "\x1b[5~", "k", "g"):
        assert view.key(key)
        places.append(view.selected)
    assert places == [1, 11, 29, 29, 19, 18, 0]
    view.key("a")
    assert view.current is None  # only active runs are listed now, and all runs are finished
    assert not view.key("q")


def test_monitor_on_a_terminal_reacts_to_keys(tmp_path: Path) -> None:
    """In a pseudo-terminal, as over ssh, list 60 runs, press an arrow key, and quit with q."""
    for seed in range(60):
        place = tmp_path / "runs" / "s" / "X-1" / "scale=full" / f"seed={seed}"
        place.mkdir(parents=True)
        state = "diverged" if seed == 59 else "finished"
        write_json(place / "status.json", {"state": state, "heartbeat": time.time(), "reason": "loss is nan"})
        (place / "training.log").write_text(f"the log of seed {seed}\n", encoding="utf-8")
    main_end, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "oelm.cli.main",
        "monitor",
        "--runs",
        str(tmp_path / "runs"),
        "--every",
        "0.2",
    ]
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        env={**environ, "TERM": "xterm", "LINES": "40", "COLUMNS": "160"},
    )
    close(terminal)
    seen = ""

    def until(words: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 300
        while words not in seen:
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([main_end], [], [], 0.2)[0]:
                seen += read(main_end, 65536).decode(errors="replace")

    until("the log of seed 59")  # the diverged run is listed first, and the first run is selected
    assert "DIVERGED" in seen
    write(main_end, b"\x1b[B")
    until("the log of seed 0")
    write(main_end, b"q")
    with contextlib.suppress(OSError):  # on Linux, reading fails once the process has closed the terminal
        while process.poll() is None:
            if select.select([main_end], [], [], 0.2)[0]:
                read(main_end, 65536)
    assert process.wait(timeout=300) == 0
    close(main_end)
