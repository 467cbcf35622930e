"""Signals between launchers, workers and ranks: handle them, name them, and end a process with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` for these signals inside the `with` block; has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def killed_by(code: int) -> str:
    """Return a text such as "killed by SIGKILL" for a negative exit code of `subprocess` such as -9."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def die_with_parent() -> None:
    """Make the Linux kernel kill this process when its parent process ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
