"""Signals that a launcher or a worker receives, and those that end its child processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` for these signals inside the block; has no effect outside the main thread."""
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
    """ "killed by SIGKILL" for the exit code -9 that `subprocess` reports."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
