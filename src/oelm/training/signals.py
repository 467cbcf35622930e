"""Being asked to stop: signals of a cluster or a person, and a time limit, as one question the loop asks."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

# SLURM sends SIGTERM or, with --signal, SIGUSR1/2; Ctrl-C is SIGINT; the end of an ssh session SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

# Environment of a rank: a private folder of the process that started it, for the store and failure reports.
RANK_DIR = "OELM_RANK_DIR"


def signals_to_handle() -> list[signal.Signals]:
    """STOP_SIGNALS, without SIGHUP where it is ignored: `nohup` asks to outlive the session."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and ignored)]


# Environment, set by our SLURM jobs: the unix time from which on SLURM's signal means the time limit.
TIME_LIMIT_NEAR = "OELM_TIME_LIMIT_NEAR"
_DEFAULT_NOTICE = 240.0  # seconds before SLURM_JOB_END_TIME, for a job script that we did not write


def describe_signal(number: int) -> str:
    """Why the process was asked to stop, as far as the signal and SLURM's environment tell."""
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
    """While active, the stop signals only set `reason`; the loop looks at it between micro-batches.

    A second Ctrl-C is meant: it interrupts at once, and the last checkpoint remains.

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
        """Whether somebody asked, as against a time limit that has passed."""
        return bool(self._signal)

    @property
    def reason(self) -> str:
        """Why to stop; empty to go on."""
        if not self._signal and self.deadline is not None and time.monotonic() >= self.deadline:
            return f"time limit of {self.time_limit:g} s"
        return self._signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == "SIGINT":
            raise KeyboardInterrupt
        self._signal = describe_signal(number)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._before = {number: signal.signal(number, self._note) for number in signals_to_handle()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
