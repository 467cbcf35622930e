"""`oelm monitor`: the state of all runs, live, with the log of the selected one; ssh is enough."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oelm.cli.options import add_runs, command_parser
from oelm.cli.status import HEADER, add_filters, cells, summary, wanted
from oelm.experiments.registry import TROUBLE, Run, tail
from oelm.experiments.worker import CONSOLE
from oelm.training.folder import RunFolder

_STYLE = {"running": "green", "finished": "dim", "pending": "dim", "interrupted": "yellow"}
_KEYS = "up/down or k/j select   a all/active   q quit"
_LOG_LINES = 10


def add_parser(subparsers: Any) -> None:
    parser = command_parser(subparsers, "monitor", "the state of all runs, live", "oelm monitor --study gap")
    add_runs(parser)
    add_filters(parser)
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="time between looks")
    parser.add_argument("--once", action="store_true", help="draw it once and leave")


class View:
    """What is on the screen: which runs, which of them is selected."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.selected = 0
        self.only_active = False

    def update(self, runs: list[Run]) -> None:
        name = self.current.path if self.current else None
        self.runs = [r for r in runs if not self.only_active or r.state not in ("finished", "pending")]
        places = [i for i, r in enumerate(self.runs) if r.path == name]
        self.selected = places[0] if places else min(self.selected, max(0, len(self.runs) - 1))

    @property
    def current(self) -> Run | None:
        return self.runs[self.selected] if self.selected < len(self.runs) else None

    def key(self, key: str) -> bool:
        """React to a key; False means leave."""
        if key in ("q", "\x03"):
            return False
        if key in ("j", "\x1b[B"):
            self.selected = min(self.selected + 1, max(0, len(self.runs) - 1))
        elif key in ("k", "\x1b[A"):
            self.selected = max(self.selected - 1, 0)
        elif key == "a":
            self.only_active = not self.only_active
        return True

    def draw(self, height: int) -> Group:
        """Hundreds of runs fit: only the rows around the selected one are drawn."""
        room = max(3, height - _LOG_LINES - 9)
        first = max(0, min(self.selected - room // 2, len(self.runs) - room))
        table = Table(expand=True, box=None, pad_edge=False)
        for name in HEADER:
            table.add_column(name, no_wrap=True, overflow="ellipsis")
        for place, run in list(enumerate(self.runs))[first : first + room]:
            style = "bold red" if run.state in TROUBLE else _STYLE.get(run.state, "")
            table.add_row(*cells(run), style=f"{style} reverse" if place == self.selected else style)
        return Group(Text(f"{summary(self.runs)}    {_KEYS}"), table, self._log())

    def _log(self) -> Panel:
        run = self.current
        if run is None:
            return Panel(Text("no runs yet"))
        lines = tail(RunFolder(run.path).log_file, _LOG_LINES) or tail(run.path / CONSOLE, _LOG_LINES)
        return Panel(Text("\n".join(lines) or "(no log yet)", overflow="ellipsis"), title=str(run.path))


def run(args: argparse.Namespace) -> int:
    view, console = View(), Console()
    view.update(wanted(args))
    if args.once:
        console.print(view.draw(console.height))
        return 0
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        looked = 0.0
        while True:
            if time.monotonic() - looked > args.every:
                view.update(wanted(args))
                looked = time.monotonic()
            live.update(view.draw(console.height), refresh=True)
            key = keys(min(args.every, 0.5))
            if key and not view.key(key):
                return 0


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key; "" when none came or there is no terminal."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def wait(seconds: float) -> str:
        if not select.select([file], [], [], seconds)[0]:
            return ""
        return os.read(file, 8).decode(errors="replace")  # an arrow key comes as three bytes at once

    try:
        tty.setcbreak(file)
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
