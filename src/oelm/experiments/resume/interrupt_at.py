"""A worker process that waits at a chosen moment, so that a test can interrupt it exactly there.

`python -m oelm.experiments.resume.interrupt_at MOMENT NUMBER MARKER FOLDER [options of the worker]` runs the
worker. MOMENT is "step" or "checkpoint". At the NUMBER-th step or checkpoint the worker creates the file
MARKER and waits until that file is deleted. The caller first sends a signal and then deletes the file, so the
signal always arrives at the chosen moment.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

_PATIENCE_SECONDS = 120.0  # the worker continues if the caller does not delete MARKER within this time


def wait_at(moment: str, number: int, marker: Path) -> None:
    """Make training in this process wait at its `number`-th step or checkpoint until `marker` is deleted.

    moment: "step" (wait before the optimizer updates the parameters) or "checkpoint" (wait after the first
        bytes of the checkpoint file are written)
    marker: file that is created at that moment
    """
    import torch

    from oelm.training import loop

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # undo `nohup`, which would ignore the check's SIGHUP
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
        loop.clip_gradients = before(loop.clip_gradients)
    else:
        save = torch.save

        def save_and_wait(state: Any, file: Any, *args: Any, **options: Any) -> None:
            save(state, cast(IO[bytes], _AfterFirstBytes(file, wait_if_due)), *args, **options)

        torch.save = save_and_wait  # type: ignore[assignment]


class _AfterFirstBytes:
    """A wrapper around a file that calls the function `then` once, after the first write."""

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
