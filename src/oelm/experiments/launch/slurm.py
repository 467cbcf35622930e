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
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oelm.config.run_config import Machine
from oelm.cores import OPENMP_WAITING
from oelm.errors import OelmError, UsageError
from oelm.experiments.launch.attempts import last_exit_code
from oelm.experiments.launch.jobs import NO_RETRY, RETRIES, Events, Job, skip_if_ended
from oelm.experiments.launch.ranks import ONE_NODE, Nodes
from oelm.experiments.launch.slurm_options import SlurmOptions
from oelm.experiments.launch.worker import worker_command
from oelm.printable import printable
from oelm.runs.lock import Busy, is_held
from oelm.runs.scan import state_of
from oelm.runs.slurm_queue import JOB_ID, WAITING, job_of, queue_states
from oelm.runs.states import EXIT_DIVERGED, EXIT_FINISHED, EXIT_INTERRUPTED, is_terminal
from oelm.training.signals import TIME_LIMIT_NEAR

JOBS_FOLDER = ".slurm"  # folder below the runs folder with submitit's scripts, pickles and logs
# The ranks of a job on several nodes connect to one of _PORTS ports from _FIRST_PORT. These are below the
# ports that operating systems use for outgoing connections.
_FIRST_PORT, _PORTS = 10_000, 20_000
_SIGNAL_SLACK = 60  # seconds by which SLURM may send its signal too early
_REQUEUES = 1000  # submitit's limit of requeues; high, because a long run is requeued at each time limit


def require_sbatch() -> None:
    """Raise UsageError if this machine cannot submit SLURM jobs."""
    if shutil.which("sbatch") is None:
        raise UsageError(
            "--on slurm needs the command `sbatch`, which was not found: run this on a login node of your "
            "SLURM cluster, or leave out --on slurm to train on this machine"
        )


class SlurmTask:
    """The function that submitit pickles and calls in a SLURM task: it runs a worker as a child process."""

    def __init__(self, folder: str, machine: Machine, options: SlurmOptions) -> None:
        self.folder = folder
        self.machine = machine
        self.options = options
        self._child: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    def __call__(self) -> int:
        nodes = _nodes(self.options.nodes)
        processes = str(max(1, self.options.gpus_per_run))
        command = worker_command(self.folder, self.machine, "--processes", processes, *nodes.flags())
        # Older versions of SLURM do not set SLURM_JOB_END_TIME. The job has just started, so its end is then
        # computed from the present time.
        end = float(os.environ.get("SLURM_JOB_END_TIME") or time.time() + self.options.time_limit)
        near = f"{end - self.options.grace_seconds - _SIGNAL_SLACK:.0f}"
        environment = {**os.environ, **OPENMP_WAITING, TIME_LIMIT_NEAR: near}
        if self.machine.threads:
            environment["OMP_NUM_THREADS"] = str(self.machine.threads)
        self._child = subprocess.Popen(command, env=environment, start_new_session=True)
        # The signal handler `checkpoint()` interrupts this function and also waits for the child. If both
        # called `Popen.wait()`, the handler could block forever on the lock of the Popen object. So only a
        # separate thread calls it.
        threading.Thread(target=self._wait_for_child, daemon=True).start()
        code = self._exit_code()
        if code == EXIT_INTERRUPTED and not nodes.is_first:
            # The task of the first node requeues the job. An error here would make SLURM kill that task, too.
            return code
        if code not in (EXIT_FINISHED, EXIT_DIVERGED, *([Busy.exit_code] if nodes.count == 1 else [])):
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
        return DelayedSubmission(SlurmTask(self.folder, self.machine, self.options))

    def _wait_for_child(self) -> None:
        assert self._child is not None
        self._code = self._child.wait()

    def _exit_code(self) -> int:
        """Wait until the worker has ended and return its exit code."""
        while self._code is None:
            time.sleep(0.1)
        return self._code


class SlurmLauncher:
    """Submits jobs as one SLURM array; with `wait`, also watches them until all runs have ended."""

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
                f"--runs {str(self.root)!a} contains control characters, which is not possible with SLURM: "
                "choose a different path"
            )
        self.options = options
        self.machine = replace(machine, threads=machine.threads or options.cpus)
        self.wait = wait
        self.retries = retries
        self.events = events or Events()
        self._states: dict[str, str] | None = None  # SLURM job -> state, as `squeue` last answered
        self._asked = -math.inf  # time of the last call of `squeue`

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
        waiting = [job for job in jobs if not skip_if_ended(job, self.events) and not self._update(job)]
        self._submit([job for job in waiting if not self._active(job)])
        if self.wait:
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends only the watching; the jobs continue
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
        """Return the sbatch script for an array of `count` runs. Submits nothing and does not need SLURM."""
        from submitit.slurm import slurm

        folder = self.root / JOBS_FOLDER / "%j"
        command = shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(folder)])
        return str(slurm._make_sbatch_string(command, folder, map_count=count, **self.options.parameters()))

    def _update(self, job: Job) -> bool:
        """Set the state of a job from its run folder and the SLURM queue; return whether it has ended."""
        state, status, _ = state_of(job.folder, verify=True)
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
        """Return whether the run waits in the SLURM queue for its first start or for a restart."""
        return (self._queue() or {}).get(job_of(job.folder), "") in WAITING and not is_held(job.folder)

    def _active(self, job: Job) -> bool:
        """Return whether a process works on the run, or SLURM still has the run in its queue.

        If SLURM has never answered, a submitted run counts as active.
        """
        if is_held(job.folder):
            return True
        name = job_of(job.folder)
        if not name:
            return False
        queue = self._queue()
        return queue is None or name in queue

    def _may_retry(self, job: Job) -> bool:
        """Count a failure of a job that SLURM no longer lists; return whether to submit the job again."""
        job.failures += 1
        if job.failures <= self.retries and last_exit_code(job.folder) not in NO_RETRY:
            return True
        job.reason = job.reason or f"the SLURM job ended without a result; see {job.folder / 'slurm.err'}"
        self._change(job, "failed")
        return False

    def _queue(self) -> dict[str, str] | None:
        """Return the states of the SLURM jobs in the queue; call `squeue` at most once per poll.

        Returns None if SLURM has never answered; the caller then cannot know that a job has disappeared.
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
        try:
            with executor.batch():
                submitted = [
                    executor.submit(SlurmTask(str(job.folder.resolve()), self.machine, self.options))
                    for job in jobs
                ]
        except (FailedJobError, subprocess.CalledProcessError) as error:
            raise OelmError(
                f"sbatch rejected the jobs: {_last_line(error)}. Check the SLURM options of this command"
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

        require_sbatch()
        folder = self.root / JOBS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(folder=str(folder / "%j"), max_num_timeout=_REQUEUES)
        executor.update_parameters(**self.options.parameters())
        return executor

    def _change(self, job: Job, state: str) -> None:
        if job.state != state:
            job.state = state
            self.events.changed(job)


def _nodes(count: int) -> Nodes:
    """Return the index of this node among the `count` nodes of this SLURM job, and the address of node 0."""
    if count == 1:
        return ONE_NODE
    import submitit

    job = submitit.JobEnvironment()
    # All nodes must use the same port, so it is computed from the job ID.
    port = _FIRST_PORT + int(job.raw_job_id) % _PORTS
    return Nodes(count, job.node, f"{job.hostnames[0]}:{port}")


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
