"""Requests to stop a run: signals from a cluster or a user, and a time limit."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# SLURM sends SIGTERM or, with --signal, SIGUSR1/2. Ctrl-C sends SIGINT, a closed ssh session SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

# Environment variable that the launcher sets for each rank: a private folder through which the ranks find
# each other (torch's FileStore) and report failures.
RANK_DIR = "OELM_RANK_DIR"


def signals_to_handle() -> list[signal.Signals]:
    """Return STOP_SIGNALS, without SIGHUP if `nohup` made the process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and ignored)]


# Environment variable that our SLURM scripts set: a signal after this unix time is due to the time limit.
TIME_LIMIT_NEAR = "OELM_TIME_LIMIT_NEAR"
# In other SLURM scripts, a signal in the last seconds before SLURM_JOB_END_TIME is due to the time limit.
_DEFAULT_NOTICE = 240.0


def describe_signal(number: int) -> str:
    """Return why the process was asked to stop: the name of the signal, and under SLURM the likely cause."""
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
    """Context in which a stop signal only sets `reason`, which the loop checks between micro-batches.

    A second Ctrl-C raises KeyboardInterrupt at once, so the run resumes from its last checkpoint.

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
        """Why the run must stop, or "" if it may continue."""
        if not self._signal and self.deadline is not None and time.monotonic() >= self.deadline:
            return f"time limit of {self.time_limit:g} s"
        return self._signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == "SIGINT":
            raise KeyboardInterrupt
        self._signal = describe_signal(number)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            self._before = {number: signal.signal(number, self._note) for number in signals_to_handle()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
