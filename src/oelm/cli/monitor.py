"""`oelm monitor`: show the state of all runs in the terminal, and the log of the selected run."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oelm.cli.status import HEADER, RunFilter, cells, summary
from oelm.experiments.launch.worker import CONSOLE
from oelm.printable import printable
from oelm.runs.folder import RunFolder
from oelm.runs.progress import study_progress
from oelm.runs.scan import RunInfo, tail
from oelm.runs.states import TROUBLE, is_terminal

_STYLE = {"running": "green", "finished": "dim", "pending": "dim", "interrupted": "yellow"}
_KEYS = "up/down, page up/down, home/end: select   a: all/active   q: quit"
_LOG_LINES = 10
_FIXED_LINES = 4  # number of lines for the summary, the header of the table and the frame of the log
_MOST_STUDIES = 3  # maximum number of studies with a line of their own

# Columns that are left out on a narrow terminal, the least important first.
_OPTIONAL = ("study", "steps/s", "heartbeat", "loss", "metric", "ETA")
_REASON_WIDTH = 12

_PAGE, _END = 10, 1 << 30
_MOVES = {
    **dict.fromkeys(("j", "\x1b[B", "\x1bOB"), 1),
    **dict.fromkeys(("k", "\x1b[A", "\x1bOA"), -1),
    **dict.fromkeys((" ", "\x1b[6~"), _PAGE),
    **dict.fromkeys(("b", "\x1b[5~"), -_PAGE),
    **dict.fromkeys(("G", "\x1b[F", "\x1b[4~"), _END),
    **dict.fromkeys(("g", "\x1b[H", "\x1b[1~"), -_END),
}


class View:
    """The state of the screen: `found` (all runs), `runs` (all or only the active ones), the selected run."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.found: list[RunInfo] = []
        self.runs: list[RunInfo] = []
        self.selected = 0
        self.only_active = False

    def update(self, found: list[RunInfo]) -> None:
        name = self.current.path if self.current else None
        self.found = found
        self.runs = [r for r in found if not self.only_active or r.state not in ("finished", "pending")]
        places = [i for i, r in enumerate(self.runs) if r.path == name]
        self.selected = places[0] if places else min(self.selected, max(0, len(self.runs) - 1))

    @property
    def current(self) -> RunInfo | None:
        return self.runs[self.selected] if self.selected < len(self.runs) else None

    def key(self, key: str) -> bool:
        """Handle a key that the user pressed; return False if it means quit."""
        if key in ("q", "\x03"):
            return False
        if key in _MOVES:
            self.selected = max(0, min(self.selected + _MOVES[key], len(self.runs) - 1))
        elif key == "a":
            self.only_active = not self.only_active
            self.update(self.found)
        return True

    def draw(self, width: int, height: int) -> Group:
        """Return the screen as a rich object, with only the part of a long list around the selected run."""
        studies = self.studies()
        room = max(3, height - _LOG_LINES - _FIXED_LINES - len(studies))
        first = max(0, min(self.selected - room // 2, len(self.runs) - room))
        runs = self.runs[first : first + room]
        rows = [dict(zip(HEADER, cells(run), strict=True)) for run in runs]
        widths = fitting_columns(rows, width)
        table = Table(expand=True, box=None, pad_edge=False)
        # The column "reason" gets the space that the other columns leave. Every width is set here, because
        # rich would shrink all columns, and a truncated run name would be ambiguous.
        widths["run"] = min(widths["run"], width // 2)
        others = sum(need + 2 for name, need in widths.items() if name != "reason")
        widths["reason"] = max(1, width - others)
        for name, exact in widths.items():
            table.add_column(name, no_wrap=True, overflow="ellipsis", width=exact)
        for place, (run, row) in enumerate(zip(runs, rows, strict=True), first):
            style = "bold red" if run.state in TROUBLE else _STYLE.get(run.state, "")
            chosen = f"{style} reverse" if place == self.selected else style
            # Text, because rich would parse a str as markup
            table.add_row(*(Text(row[name]) for name in widths), style=chosen)
        lines = [summary(self.found), *studies]
        head = [Text(printable(line), no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(*head, table, self._log())

    def studies(self) -> list[str]:
        """Return a line about each study that has unfinished runs: what is going on and how far it is."""
        by_study: dict[str, list[RunInfo]] = {}
        for run in self.found:
            by_study.setdefault(run.study, []).append(run)
        return [
            study_progress(self.root, study, runs)
            for study, runs in by_study.items()
            if any(not is_terminal(run.state) for run in runs)
        ][:_MOST_STUDIES]

    def _log(self) -> Panel:
        run = self.current
        if run is None:
            return Panel(Text("no runs yet" if not self.found else "no active runs"), subtitle=_KEYS)
        lines = tail(RunFolder(run.path).log_file, _LOG_LINES) or tail(run.path / CONSOLE, _LOG_LINES)
        shown = "\n".join(printable(line.expandtabs()) for line in lines)
        text = Text(shown or "(no log yet)", no_wrap=True, overflow="ellipsis")
        return Panel(text, title=Text(printable(run.path)), subtitle=_KEYS)


def fitting_columns(rows: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """Return {column: its width} for the columns that fit a terminal of `width` characters."""
    need = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in HEADER}
    need["reason"] = min(need["reason"], _REASON_WIDTH)
    for name in _OPTIONAL:
        if sum(need.values()) + 2 * (len(need) - 1) <= width:
            break
        del need[name]
    return need


def monitor(
    *,
    filter: RunFilter = RunFilter(),
    every: Annotated[float, Parameter(validator=Number(gt=0))] = 2.0,
    once: bool = False,
) -> None:
    """Show all runs and the log of the selected one until the user quits.

    Parameters
    ----------
    every
        Seconds between two scans of the runs folder.
    once
        Draw the table once and exit, as without a terminal.
    """
    view, console = View(filter.runs), Console()
    view.update(filter.find())
    if once or not console.is_terminal:
        console.print(view.draw(console.width, console.height))
        return
    with (
        contextlib.suppress(KeyboardInterrupt),  # Ctrl-C quits, as q does
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        scanned = time.monotonic()
        while True:
            if time.monotonic() - scanned > every:
                view.update(filter.find())
                scanned = time.monotonic()
            live.update(view.draw(console.width, console.height), refresh=True)
            key = keys(min(every, 0.5))
            if key and not view.key(key):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to n seconds for a key and returns it, or "" if none was pressed.

    The terminal is changed so that it sends keys without Enter, and restored at the end.
    """
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
        return os.read(file, 8).decode(errors="replace")  # up to 8 bytes, because one arrow key sends three

    try:
        tty.setcbreak(file)
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
