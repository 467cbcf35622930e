"""Run many jobs through SLURM with submitit: one array task per run, requeued until the run has ended.

A task reads the state of its run from the run folder: it skips a finished run, continues an interrupted run,
and exits if another process holds the run's lock. SLURM signals the task before the time limit or a
preemption; the worker then writes a checkpoint, the task is requeued, and the run resumes exactly. Each run
folder has links to the logs of its SLURM job.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oelm.config.run_config import Machine
from oelm.errors import OelmError, UsageError
from oelm.experiments.launch.attempts import last_exit_code
from oelm.experiments.launch.jobs import NO_RETRY, RETRIES, Events, Job, skip_if_ended
from oelm.experiments.launch.worker import worker_command
from oelm.printable import printable
from oelm.runs.lock import Busy, is_held
from oelm.runs.scan import state_of
from oelm.runs.slurm_queue import JOB_ID, WAITING, job_of, queue_states
from oelm.runs.states import EXIT_DIVERGED, EXIT_FINISHED, is_terminal
from oelm.training.signals import TIME_LIMIT_NEAR

JOBS_FOLDER = ".slurm"  # folder below the runs folder with submitit's scripts, pickles and logs
_GRACE_SECONDS = 120  # longest default time from SLURM's signal to its kill
_SIGNAL_SLACK = 60  # SLURM may send its signal up to a minute early
_REQUEUES = 1000  # a long run is requeued at each time limit, so submitit's own bound must not end it

# sbatch option -> characters allowed in its value, as the inside of a regular-expression set.
_ALLOWED = {
    "partition": r"\w.,+-",
    "account": r"\w.,+@-",
    "qos": r"\w.,+-",
    "gres": r"\w.,:=()*/-",
    "constraint": r"\w.,:&|*!()\[\]-",
}


@dataclass(frozen=True)
class SlurmOptions:
    """Options for sbatch. They apply to each task of the job array, and each task is one run."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""  # "" = gpu:<gpus_per_run>, or none if gpus_per_run is 0
    constraint: str = ""
    time_limit: float = 24 * 3600.0  # seconds
    cpus: int = 4
    memory_gb: float = 0.0  # 0 = the cluster's default
    gpus_per_run: int = 1
    parallel: int = 64  # tasks that run at the same time
    grace: int = 0  # seconds from SLURM's signal to its kill; 0 = time_limit / 5, at most 120

    def __post_init__(self) -> None:
        """Raise UsageError for a value that could add lines or commands to the sbatch script."""
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value and re.fullmatch(f"[{allowed}]+", value, re.ASCII) is None:
                signs = " ".join(allowed.replace(r"\w", "_").replace("\\", ""))
                raise UsageError(f"--{name} {value!a}: allowed are letters, digits and {signs}")
        least = {"cpus": 1, "parallel": 1, "gpus_per_run": 0, "memory_gb": 0, "grace": 0}
        for name, low in least.items():
            if not low <= getattr(self, name) < 1e6:
                flag = name.removesuffix("_gb").replace("_", "-")
                raise UsageError(f"--{flag} must be {low} or more, not {getattr(self, name):g}")

    @property
    def grace_seconds(self) -> int:
        return self.grace or int(min(_GRACE_SECONDS, max(10, self.time_limit / 5)))

    def parameters(self) -> dict[str, Any]:
        """Return the options under the names that submitit expects, most of which are those of sbatch."""
        grace = self.grace_seconds
        gres = self.gres or (f"gpu:{self.gpus_per_run}" if self.gpus_per_run else "")
        optional = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "gres": gres,
            "constraint": self.constraint,
            "mem": f"{self.memory_gb:g}GB" if self.memory_gb else "",
        }
        return {
            "job_name": "oelm",
            "time": max(1, int(self.time_limit // 60)),
            "nodes": 1,
            "ntasks_per_node": 1,
            "cpus_per_task": self.cpus,
            "signal_delay_s": grace,
            "array_parallelism": self.parallel,
            "wckey": "oelm",
            **{name: value for name, value in optional.items() if value},
            # Some clusters refuse to requeue a task that was submitted without --requeue.
            "additional_parameters": {"requeue": True},
        }


class SlurmTask:
    """The callable that submitit pickles and a SLURM task runs: it starts the worker as a child process."""

    def __init__(
        self, folder: str, machine: Machine, processes: int, time_limit: float, grace: float
    ) -> None:
        self.folder = folder
        self.machine = machine
        self.processes = processes
        self.time_limit, self.grace = time_limit, grace  # seconds, as requested from SLURM
        self._child: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    def __call__(self) -> int:
        command = worker_command(self.folder, self.machine, "--processes", str(max(1, self.processes)))
        # Older versions of SLURM do not set SLURM_JOB_END_TIME; there, the end is computed from now, because
        # the job has just started.
        end = float(os.environ.get("SLURM_JOB_END_TIME") or time.time() + self.time_limit)
        near = f"{end - self.grace - _SIGNAL_SLACK:.0f}"
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", TIME_LIMIT_NEAR: near}
        if self.machine.threads:
            environment["OMP_NUM_THREADS"] = str(self.machine.threads)
        self._child = subprocess.Popen(command, env=environment, start_new_session=True)
        # `checkpoint` runs as a signal handler on top of this frame and also waits for the child. If both
        # called `wait`, the handler could block forever on the lock of the Popen object, so a thread waits.
        threading.Thread(target=self._wait_for_child, daemon=True).start()
        code = self._exit_code()
        if code not in (EXIT_FINISHED, EXIT_DIVERGED, Busy.exit_code):
            raise OelmError(f"the run in {self.folder} ended with exit code {code}; see slurm.err there")
        return code

    def checkpoint(self) -> Any:
        """Let the worker write a checkpoint, then return a new task for submitit to requeue.

        submitit calls this when SLURM signals the task.
        """
        from submitit.helpers import DelayedSubmission

        if self._child is not None:
            if self._code is None:
                os.kill(self._child.pid, signal.SIGTERM)
            if self._exit_code() in (EXIT_FINISHED, EXIT_DIVERGED):
                return None  # the run has just ended, so there is nothing to requeue
        return DelayedSubmission(
            SlurmTask(self.folder, self.machine, self.processes, self.time_limit, self.grace)
        )

    def _wait_for_child(self) -> None:
        assert self._child is not None
        self._code = self._child.wait()

    def _exit_code(self) -> int:
        """Wait until the child has ended and return its exit code."""
        while self._code is None:
            time.sleep(0.1)
        return self._code


class SlurmLauncher:
    """Submits jobs as one SLURM array; with `wait`, watches their run folders until all runs have ended."""

    poll_seconds = 5.0

    def __init__(
        self,
        root: Path | str,
        options: SlurmOptions,
        machine: Machine,
        *,
        wait: bool = True,
        retries: int = RETRIES,
        events: Events | None = None,
    ) -> None:
        self.root = Path(root).resolve()
        if printable(self.root) != str(self.root):  # the path is written into the sbatch script
            raise UsageError(
                f"--runs {str(self.root)!a}: with SLURM, this path must not contain control characters"
            )
        self.options = options
        self.machine = replace(machine, threads=machine.threads or options.cpus)
        self.wait = wait
        self.retries = retries
        self.events = events or Events()
        self._states: dict[str, str] | None = None  # SLURM job -> state, from the last call of `squeue`
        self._asked = -math.inf  # time of the last call of `squeue`

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
        waiting = [job for job in jobs if not skip_if_ended(job, self.events) and not self._update(job)]
        self._submit([job for job in waiting if not self._active(job)])
        if self.wait:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends only the watching; the jobs go on
                self._watch(jobs, waiting)
        return jobs

    def _watch(self, jobs: Sequence[Job], waiting: list[Job]) -> None:
        while waiting:
            time.sleep(self.poll_seconds)
            waiting = [job for job in waiting if not self._update(job)]
            lost = [job for job in waiting if not self._active(job) and not self._update(job)]
            self._submit([job for job in lost if self._may_retry(job)])
            waiting = [job for job in waiting if not job.ended]
            self.events.tick(jobs)

    def script(self, count: int) -> str:
        """Return the sbatch script of an array of `count` runs; works without SLURM and submits nothing."""
        from submitit.slurm import slurm

        folder = self.root / JOBS_FOLDER / "%j"
        command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(folder)])
        return str(slurm._make_sbatch_string(command, folder, map_count=count, **self.options.parameters()))

    def _update(self, job: Job) -> bool:
        """Read the state of the run from its folder; return whether the run has ended."""
        state, status, _ = state_of(job.folder)
        job.reason = status.reason if status else ""
        if is_terminal(state):
            self._change(job, state)
        elif self._waits_in_queue(job):
            if job.state == "running":
                self._change(job, "queued")
        elif state == "running":
            self._change(job, "running")
        return job.ended

    def _waits_in_queue(self, job: Job) -> bool:
        """Return whether the SLURM job of the run waits to be started, for the first time or again."""
        return (self._queue() or {}).get(job_of(job.folder), "") in WAITING and not is_held(job.folder)

    def _active(self, job: Job) -> bool:
        """Return whether a process works on the run or SLURM still has the run's job in its queue."""
        if is_held(job.folder):
            return True
        name = job_of(job.folder)
        if not name:
            return False
        queue = self._queue()
        return queue is None or name in queue

    def _may_retry(self, job: Job) -> bool:
        """Count a failure of a run whose SLURM job has disappeared; return whether to submit it again."""
        job.failures += 1
        if job.failures <= self.retries and last_exit_code(job.folder) not in NO_RETRY:
            return True
        job.reason = job.reason or f"the SLURM job ended without a result; see {job.folder / 'slurm.err'}"
        self._change(job, "failed")
        return False

    def _queue(self) -> dict[str, str] | None:
        """Return the states of the SLURM jobs in the queue; calls `squeue` at most once per poll.

        Returns None if SLURM has never answered; then no job may be considered lost.
        """
        if time.monotonic() - self._asked > self.poll_seconds / 2:
            states = queue_states()
            if states is not None:  # if SLURM does not answer, keep its last answer
                self._states = states
                self._asked = time.monotonic()
        return self._states

    def _submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        from submitit.core.utils import FailedJobError

        executor = self._executor()
        options = self.options
        limits = (options.gpus_per_run, options.time_limit, options.grace_seconds)
        try:
            with executor.batch():
                submitted = [
                    executor.submit(SlurmTask(str(job.folder.resolve()), self.machine, *limits))
                    for job in jobs
                ]
        except (FailedJobError, subprocess.CalledProcessError) as error:
            raise OelmError(
                f"sbatch refused the jobs: {_last_line(error)}. Check the SLURM options of this command"
            ) from None
        for job, handle in zip(jobs, submitted, strict=True):
            (job.folder / JOB_ID).write_text(f"{handle.job_id}\n", encoding="utf-8")
            for name, log in (("slurm.out", handle.paths.stdout), ("slurm.err", handle.paths.stderr)):
                with contextlib.suppress(FileNotFoundError):
                    (job.folder / name).unlink()
                (job.folder / name).symlink_to(os.path.relpath(log, job.folder))
            self._change(job, "submitted")
        self._asked = -math.inf

    def _executor(self) -> Any:
        import submitit

        if shutil.which("sbatch") is None:
            raise OelmError(
                "the command `sbatch` was not found: run this on a login node of your SLURM cluster"
            )
        folder = self.root / JOBS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(folder=str(folder / "%j"), max_num_timeout=_REQUEUES)
        executor.update_parameters(**self.options.parameters())
        return executor

    def _change(self, job: Job, state: str) -> None:
        if job.state != state:
            job.state = state
            self.events.changed(job)


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
