"""`Journal` writes training.log, and shows the same lines in a terminal or prints them to another log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from oelm.printable import printable

_ECHO_SECONDS = 30.0


class Journal:
    """Writes time-stamped lines to training.log; in a terminal it also shows them and a progress bar.

    If the log cannot be written, the run continues, because no result depends on the log.

    echo: "stdout" or "stderr": print the time-stamped lines there instead, and the progress every 30 seconds
    """

    def __init__(
        self, path: Path | None, *, title: str = "", show: bool | None = None, echo: str = ""
    ) -> None:
        self._file: IO[bytes] | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._progress: Any = None
        self._task: Any = None
        self._show = sys.stderr.isatty() if show is None else show
        self._title = title
        self._echo = echo
        self._echoed = time.monotonic()  # when the last line was printed

    def line(self, text: str, *, show: bool = True) -> None:
        """Write the line or lines of `text` to the log, each with a time stamp, and show them."""
        text = printable(text, lines=True)
        lines = _stamped(text)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(lines.encode(errors="replace"))
        if not show:
            return
        if self._echo:
            self._print(lines)
        elif self._show:
            with self._terminal_may_vanish():
                self._console().print(text, markup=False, highlight=False)

    def progress(self, step: int, total: int, text: str) -> None:
        """Update the progress bar, or print the progress; nothing is written to training.log."""
        if self._echo and time.monotonic() - self._echoed >= _ECHO_SECONDS:
            self._print(_stamped(f"step {step}/{total}  {printable(text)}"))
        if self._echo or not self._show:
            return
        with self._terminal_may_vanish():
            self._console()
            if self._task is None:
                self._task = self._progress.add_task(printable(self._title), total=total, status="")
            self._progress.update(self._task, completed=step, status=printable(text))

    def _print(self, lines: str) -> None:
        self._echoed = time.monotonic()
        with self._terminal_may_vanish():
            print(lines, end="", file=getattr(sys, self._echo), flush=True)

    @contextlib.contextmanager
    def _terminal_may_vanish(self) -> Iterator[None]:
        """Turn off the display, instead of raising, if the `with` block cannot write to the terminal.

        A terminal is gone, for example, when an ssh session has ended.
        """
        try:
            yield
        except OSError:
            self._show, self._echo = False, ""

    def _console(self) -> Any:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self._progress.console

    def close(self) -> None:
        if self._progress is not None:
            with self._terminal_may_vanish():
                self._progress.stop()
            self._progress = self._task = None
        if self._file is not None:
            self._file.close()
            self._file = None


def _stamped(text: str) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    return "".join(f"{stamp} {part}\n" for part in text.splitlines() or [""])
