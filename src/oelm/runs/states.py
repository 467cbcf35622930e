"""The states of a run and the exit codes of the process that trains it."""

from __future__ import annotations

from typing import Literal

from oelm.errors import OelmError, TransientError

#: States that a run writes to its status.json.
State = Literal["running", "interrupted", "finished", "diverged", "failed", "oom"]

# Exit codes of one run; a launcher decides from them whether to start the run again.
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 75  # "continue me": run the same command again (EX_TEMPFAIL of sysexits.h)
EXIT_DIVERGED = 76
EXIT_PERMANENT = 78  # the same command fails again until the user changes something (EX_CONFIG)

EXIT_CODES: dict[str, int] = {
    "finished": EXIT_FINISHED,
    "failed": EXIT_FAILED,
    "oom": EXIT_FAILED,
    "interrupted": EXIT_INTERRUPTED,
    "diverged": EXIT_DIVERGED,
}

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
    """Return the exit code of a run that ended with `error`; 78 for an error that a retry would repeat."""
    permanent = error.exit_code == EXIT_FAILED and not isinstance(error, TransientError)
    return EXIT_PERMANENT if permanent else error.exit_code


def is_terminal(state: str) -> bool:
    """Return whether running the same command again would change nothing: finished or diverged.

    A diverged run is terminal because the same steps would diverge again.
    """
    return state in ("finished", "diverged")
