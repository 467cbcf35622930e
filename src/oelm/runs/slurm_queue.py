"""What SLURM's queue says about the jobs that were submitted for runs. None where there is no SLURM."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

JOB_ID = "slurm_job"  # in the run folder: the job that was last submitted for it
_SQUEUE_SECONDS = 20.0
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")

# States of a job that has no process: waiting for its first start, or again after a requeue.
WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
)


def job_of(folder: Path) -> str:
    """The job last submitted for a run; "" when there is none (or no valid number in the file)."""
    try:
        with open(folder / JOB_ID, encoding="ascii", errors="replace") as file:
            name = file.read(64).strip()
    except OSError:
        return ""
    return name if _JOB_ID.fullmatch(name) else ""


def queue_states() -> dict[str, str] | None:
    """Job -> its state, of all jobs that are pending, running or being requeued; None while SLURM does not
    answer. A task of an array is listed by both of its names, 12_3 and its own number."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", "--array", "--format=%F_%K %A %T"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SQUEUE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode != 0:
        return None
    found = {}
    for line in listed.stdout.splitlines():
        *names, state = line.split()
        found.update(dict.fromkeys(names, state))
    return found
