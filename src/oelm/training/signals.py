"""Requests to stop a run: signals from SLURM or the user, and a time limit."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# SLURM sends SIGTERM or, with its option --signal, SIGUSR1 or SIGUSR2. Ctrl-C sends SIGINT. A terminal that
# is closed (the end of an ssh session) sends SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

# Environment variable that the launcher sets for each rank. Its value is a private folder, in which the ranks
# find each other (torch's FileStore) and report failures.
RANK_DIR = "OELM_RANK_DIR"


def signals_to_handle() -> list[signal.Signals]:
    """Return STOP_SIGNALS, without SIGHUP if `nohup` made the process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and ignored)]


# Environment variable that the SLURM scripts of oelm set to a unix time. A signal at or after that time
# means that the time limit of the job is near; an earlier one means preemption, a requeue or scancel.
TIME_LIMIT_NEAR = "OELM_TIME_LIMIT_NEAR"
# Without OELM_TIME_LIMIT_NEAR, that time is this many seconds before SLURM_JOB_END_TIME.
_DEFAULT_NOTICE = 240.0


def describe_signal(number: int) -> str:
    """Return why signal `number` was sent to the process: its name and, in a SLURM job, the likely cause."""
    name = signal.Signals(number).name
    if number == signal.SIGINT or "SLURM_JOB_ID" not in os.environ:
        return name
    near = _number(TIME_LIMIT_NEAR)
    end = _number("SLURM_JOB_END_TIME")
    if near is None and end is not None:
        near = end - _DEFAULT_NOTICE
    if near is None:
        return f"{name} by SLURM"
    if time.time() >= near:
        return f"time limit of the SLURM job ({name})"
    return f"preempted, requeued or cancelled by SLURM ({name})"


def _number(variable: str) -> float | None:
    try:
        return float(os.environ[variable])
    except (KeyError, ValueError):
        return None


class StopRequest:
    """A context in which a stop signal only sets `reason`, which the training loop checks regularly.

    So the run can write a checkpoint before it stops. A second Ctrl-C raises KeyboardInterrupt at once,
    without a new checkpoint.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.reason
    'SIGTERM'
    """

    def __init__(self, time_limit: float = 0.0) -> None:
        self.deadline = time.monotonic() + time_limit if time_limit > 0 else None
        self.time_limit = time_limit
        self._signal = ""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def signalled(self) -> bool:
        """Whether a stop signal arrived; a time limit that has passed does not count."""
        return bool(self._signal)

    @property
    def reason(self) -> str:
        """Why the run must stop: the signal or the time limit; "" if it may continue."""
        if not self._signal and self.deadline is not None and time.monotonic() >= self.deadline:
            return f"time limit of {self.time_limit:g} s"
        return self._signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == "SIGINT":
            raise KeyboardInterrupt
        self._signal = describe_signal(number)

    def __enter__(self) -> StopRequest:
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in signals_to_handle()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
