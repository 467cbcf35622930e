"""The states of a run and the exit codes of the process that trains it."""

from __future__ import annotations

from typing import Literal

from oelm.errors import OelmError, TransientError

#: The states that a training process writes to status.json.
State = Literal["running", "interrupted", "finished", "diverged", "failed", "oom"]

# Exit codes of the process that trains a run. A launcher uses them to decide whether to start the run again.
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75  # the same command continues the run (EX_TEMPFAIL of sysexits.h)
EXIT_DIVERGED = 76
EXIT_PERMANENT = 78  # the same command fails again until the user changes something (EX_CONFIG of sysexits.h)

EXIT_CODES: dict[str, int] = {
    "finished": EXIT_FINISHED,
    "failed": EXIT_FAILED,
    "oom": EXIT_FAILED,
    "interrupted": EXIT_INTERRUPTED,
    "diverged": EXIT_DIVERGED,
}

#: The start of the event in metrics.jsonl with which a diverged run ends.
DIVERGENCE = "diverged: "

#: All states that `oelm status` shows, in display order: states that need attention come first.
STATES = (
    "dead",
    "stalled",
    "diverged",
    "oom",
    "failed",
    "broken",
    "running",
    "queued",
    "interrupted",
    "pending",
    "finished",
)
TROUBLE = frozenset({"dead", "stalled", "diverged", "oom", "failed", "broken"})


def exit_code_of(error: OelmError) -> int:
    """Return the exit code of a run that ended with `error`; 78 if the same command would fail again.

    A launcher restarts a run that ended with exit code 1, but not one that ended with exit code 78.
    """
    permanent = error.exit_code == EXIT_FAILED and not isinstance(error, TransientError)
    return EXIT_PERMANENT if permanent else error.exit_code


def is_terminal(state: str) -> bool:
    """Return whether a run in `state` is never started again: true for finished and diverged runs.

    A diverged run would diverge again, because its training steps would be the same.
    """
    return state in ("finished", "diverged")
