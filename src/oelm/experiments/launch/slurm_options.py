"""Options of SLURM jobs. They are checked, so that no value can add commands to the sbatch script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oelm.errors import UsageError

_GRACE_SECONDS = 120  # upper limit of `SlurmOptions.grace_seconds` if the user does not set it

# sbatch option -> characters that its value may contain, written as the inside of a regular expression [...].
_ALLOWED = {
    "partition": r"\w.,+-",
    "account": r"\w.,+@-",
    "qos": r"\w.,+-",
    "gres": r"\w.,:=()*/-",
    "constraint": r"\w.,:&|*!()\[\]-",
}
_ALLOWED_IN_OTHERS = r"\w .,:;=+@%/&|*!()\[\]~-"

# sbatch option -> the flag of `oelm run` that sets it.
_FLAGS = {name: f"--{name}" for name in (*_ALLOWED, "time", "nodes")}
_FLAGS |= {"cpus-per-task": "--cpus", "mem": "--memory"}
# sbatch options that oelm or submitit sets; other values would break the launcher.
_FORBIDDEN = {
    *("array", "chdir", "error", "export-file", "input", "job-name", "no-requeue", "ntasks"),
    *("ntasks-per-node", "open-mode", "output", "parsable", "quiet", "requeue", "signal", "test-only"),
    *("wait", "wckey", "wrap"),
}


@dataclass(frozen=True)
class SlurmOptions:
    """Options for sbatch. They apply to each task of the job array, and each task is one run."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""  # resources per node; "" = gpu:<gpus_per_run>, or none if gpus_per_run is 0
    constraint: str = ""
    time_limit: float = 24 * 3600.0  # seconds
    cpus: int = 4  # CPU cores per node
    memory_gb: float = 0.0  # per node; 0 = the cluster's default
    gpus_per_run: int = 1  # GPUs on each node of a run
    nodes: int = 1  # nodes per run
    parallel: int = 64  # how many tasks of the array may run at the same time
    # Seconds between SLURM's warning signal and SIGKILL; 0 = a fifth of the time limit, from 10 s to 120 s.
    grace: int = 0
    setup: tuple[str, ...] = ()  # shell commands at the start of the script, such as `module load cuda`
    # Other sbatch options, name -> value; True for a flag without a value.
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UsageError for a value that could add lines or commands to the sbatch script."""
        for name, allowed in _ALLOWED.items():
            _check_characters(f"--{name}", getattr(self, name), allowed)
        for name, value in self.sbatch.items():
            _check_sbatch_name(name)
            if value is False:
                raise UsageError(f"--sbatch {name} cannot be false; leave the option out instead")
            _check_characters(f"--sbatch {name}:", "" if value is True else str(value), _ALLOWED_IN_OTHERS)
        for line in self.setup:
            if not line.strip() or any(ord(c) < 32 and c != "\t" for c in line):
                raise UsageError(
                    f"--setup {line!a} is empty or has line breaks; give one command per --setup option"
                )
        least = {"cpus": 1, "parallel": 1, "nodes": 1, "gpus_per_run": 0, "memory_gb": 0, "grace": 0}
        for name, low in least.items():
            if not low <= getattr(self, name) < 1e6:
                flag = name.removesuffix("_gb").replace("_", "-")
                raise UsageError(f"--{flag} must be {low} or more, not {getattr(self, name):g}")

    @property
    def grace_seconds(self) -> int:
        return self.grace or int(min(_GRACE_SECONDS, max(10, self.time_limit / 5)))

    def parameters(self) -> dict[str, Any]:
        """Return the options as parameters of submitit, most of which have the same names as in sbatch."""
        gres = self.gres or (f"gpu:{self.gpus_per_run}" if self.gpus_per_run else "")
        optional = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "gres": gres,
            "constraint": self.constraint,
            "mem": f"{self.memory_gb:g}GB" if self.memory_gb else "",
            "setup": list(self.setup),
        }
        # Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.
        srun = ["--cpus-per-task", str(self.cpus)]
        if self.nodes > 1:  # if one node fails, the ranks of the other nodes must end, not wait for it
            srun += ["--kill-on-bad-exit=1", "--wait=300"]
        return {
            "job_name": "oelm",
            "time": max(1, int(self.time_limit // 60)),
            "nodes": self.nodes,
            "ntasks_per_node": 1,
            "cpus_per_task": self.cpus,
            "signal_delay_s": self.grace_seconds,
            "array_parallelism": self.parallel,
            "wckey": "oelm",
            "srun_args": srun,
            **{name: value for name, value in optional.items() if value},
            # Some clusters refuse to requeue a task that was submitted without --requeue.
            "additional_parameters": {"requeue": True, **self.sbatch},
        }


def parse_sbatch(words: tuple[str, ...]) -> dict[str, str | bool]:
    """Return the sbatch options in the arguments of `--sbatch`, as {name: value}; True = no value given.

    >>> parse_sbatch(("reservation=tuesday", "exclusive"))
    {'reservation': 'tuesday', 'exclusive': True}
    """
    found: dict[str, str | bool] = {}
    for word in words:
        name, equals, value = word.partition("=")
        found[name.strip().removeprefix("--").replace("_", "-")] = value if equals else True
    return found


def _check_sbatch_name(name: str) -> None:
    if re.fullmatch(r"[a-z][a-z0-9-]{1,40}", name, re.ASCII) is None:
        raise UsageError(
            f"--sbatch {name!a} is not the long name of an sbatch option; write for example mail-type=END"
        )
    if name in _FLAGS:
        raise UsageError(f"--sbatch {name} is not allowed; use {_FLAGS[name]} instead")
    if name in _FORBIDDEN:
        raise UsageError(
            f"--sbatch {name} is not allowed, because oelm sets this option itself to start and requeue "
            "runs; leave it out"
        )


def _check_characters(flag: str, value: str, allowed: str) -> None:
    if value and re.fullmatch(f"[{allowed}]+", value, re.ASCII) is None:
        signs = " ".join(allowed.replace(r"\w", "_").replace("\\", ""))
        raise UsageError(
            f"{flag} {value!a} has a character that is not allowed; allowed are letters, digits and {signs}"
        )
