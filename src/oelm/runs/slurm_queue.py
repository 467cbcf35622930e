"""Ask `squeue` for the states of the SLURM jobs that were submitted for runs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

JOB_ID = "slurm_job"  # file in the run folder with the number of the last job submitted for the run
_SQUEUE_SECONDS = 20.0
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")

# States of a SLURM job that has no process, because the job is waiting for its first start or for a restart.
WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
)


def job_of(folder: Path) -> str:
    """Return the number of the SLURM job last submitted for a run; "" if there is no valid number."""
    try:
        with open(folder / JOB_ID, encoding="ascii", errors="replace") as file:
            name = file.read(64).strip()
    except OSError:
        return ""
    return name if _JOB_ID.fullmatch(name) else ""


def queue_states() -> dict[str, str] | None:
    """Return {job number: state} of all pending and running SLURM jobs; None if `squeue` does not answer.

    A task of a job array has two keys: <array job number>_<task number>, such as 12_3, and its job number.
    """
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
