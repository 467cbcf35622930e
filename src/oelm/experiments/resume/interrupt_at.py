"""A worker that waits at a chosen moment to be interrupted from outside.

`python -m oelm.experiments.resume.interrupt_at MOMENT NUMBER MARKER FOLDER [worker's options]` runs the
worker. At the n-th such moment it creates the file MARKER and waits until the file is deleted. The caller
sends a signal and then deletes the file, so the signal arrives inside that moment on any machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

MOMENTS = ("step", "checkpoint")
_PATIENCE_SECONDS = 120.0


def wait_at(moment: str, number: int, marker: Path) -> None:
    """Install the wait: "step" is between gradients and update, "checkpoint" after the first bytes of one."""
    import torch

    from oelm.training import fit

    calls = 0

    def wait_if_due() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            marker.touch()
            end = time.monotonic() + _PATIENCE_SECONDS
            while marker.exists() and time.monotonic() < end:
                time.sleep(0.005)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **options: Any) -> Any:
            wait_if_due()
            return function(*args, **options)

        return waiting

    if moment == "step":
        fit.clip_gradients = before(fit.clip_gradients)
    else:
        save = torch.save

        def save_and_wait(state: Any, file: Any, *args: Any, **options: Any) -> None:
            save(state, cast(IO[bytes], _AfterFirstBytes(file, wait_if_due)), *args, **options)

        torch.save = save_and_wait  # type: ignore[assignment]


class _AfterFirstBytes:
    """A file that calls `then` once, after the first bytes were written to it."""

    def __init__(self, file: Any, then: Callable[[], None]) -> None:
        self.file, self.then, self.called = file, then, False

    def write(self, data: Any) -> int:
        written: int = self.file.write(data)
        if not self.called:
            self.called = True
            self.file.flush()
            self.then()
        return written

    def flush(self) -> None:
        self.file.flush()


def main(argv: list[str]) -> int:
    moment, number, marker, *rest = argv
    wait_at(moment, int(number), Path(marker))
    from oelm.experiments.launch.worker import main as worker

    return worker(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
