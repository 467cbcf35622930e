"""Run many jobs on this machine until every run has ended: one worker process per run, one run per slot.

The launcher skips finished runs, continues interrupted runs, and retries failed runs a limited number of
times. It waits for runs that another launcher works on, and takes them over if that launcher dies. All state
is in the run folders, so if a launcher is killed, the same command continues.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from oelm.config.run_config import Machine
from oelm.experiments.launch.attempts import Attempt, append_attempt
from oelm.experiments.launch.jobs import NO_RETRY, RETRIES, Events, Job, skip_if_ended
from oelm.experiments.launch.signals import handle_signals, killed_by
from oelm.experiments.launch.slots import Slot
from oelm.experiments.launch.warm import WarmWorker, can_fork
from oelm.experiments.launch.worker import CONSOLE, WORKER, worker_arguments
from oelm.runs.folder import RunFolder
from oelm.runs.lock import Busy, is_held
from oelm.runs.scan import state_of
from oelm.runs.schema import Status
from oelm.runs.states import EXIT_DIVERGED, EXIT_FINISHED, EXIT_INTERRUPTED, is_terminal
from oelm.training.signals import signals_to_handle

_POLL_SECONDS = 0.2
_ELSEWHERE_SECONDS = 2.0  # seconds between two checks of a run that another launcher works on

Process = subprocess.Popen[bytes] | WarmWorker


@dataclass
class _Active:
    job: Job
    slot: Slot
    process: Process = field(repr=False)


class LocalLauncher:
    """Runs jobs in the slots of this machine.

    `launch()` returns when all runs have ended or the user has stopped the launcher.

    warm: import torch once per CPU slot instead of once per run (see `oelm.experiments.launch.warm`)
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        machine: Machine,
        *,
        retries: int = RETRIES,
        events: Events | None = None,
        warm: bool = True,
    ) -> None:
        self.slots = list(slots)
        self.machine = machine
        self.retries = retries
        self.events = events or Events()
        self.stopped = False
        self._active: list[_Active] = []
        self._progress: dict[Path, tuple[int, int]] = {}
        self._interrupts = 0
        self.warm = warm
        # Name of a slot -> the server that forks its workers. `close()` ends the servers; otherwise they end
        # with this process.
        self._servers: dict[str, WarmWorker] = {}

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
        waiting = deque(job for job in jobs if not skip_if_ended(job, self.events))
        elsewhere: deque[tuple[float, Job]] = deque()
        handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(signals_to_handle())
        with handle_signals(handled, self.stop):
            while (waiting or elsewhere or self._active) and not (self.stopped and not self._active):
                for job in self._collect():
                    if job.ended or self.stopped:
                        continue
                    if job.state == "elsewhere":
                        elsewhere.append((time.monotonic(), job))
                    else:
                        waiting.append(job)
                self._check_elsewhere(elsewhere, waiting)
                self._fill_slots(waiting, elsewhere)
                self.events.tick(jobs)
                time.sleep(_POLL_SECONDS)
        return jobs

    def close(self) -> None:
        """End the servers that fork workers; workers that are still running continue."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _ended_meanwhile(self, job: Job) -> bool:
        """Return whether another launcher has run this job to its end, and if so, set the job's state."""
        state, status, note = state_of(job.folder, verify=True)
        if is_terminal(state):
            job.reason = note or (status.reason if status else "")
            self._change(job, state)
            return True
        return False

    def _fill_slots(self, waiting: deque[Job], elsewhere: deque[tuple[float, Job]]) -> None:
        """Start waiting jobs in all free slots; a run that another process trains moves to `elsewhere`."""
        taken = {active.slot.name for active in self._active}
        free = [slot for slot in self.slots if slot.name not in taken]
        while free and waiting and not self.stopped:
            job = waiting.popleft()
            if is_held(job.folder):
                self._change(job, "elsewhere")
                elsewhere.append((time.monotonic(), job))
            elif not self._ended_meanwhile(job):
                self._start(job, free.pop(0))

    def _check_elsewhere(self, elsewhere: deque[tuple[float, Job]], waiting: deque[Job]) -> None:
        """Move runs from `elsewhere` to `waiting` if another launcher stopped before they ended."""
        while elsewhere and time.monotonic() - elsewhere[0][0] > _ELSEWHERE_SECONDS:
            _, job = elsewhere.popleft()
            if self._ended_meanwhile(job):
                continue
            if is_held(job.folder):
                elsewhere.append((time.monotonic(), job))
            else:
                waiting.append(job)

    def _start(self, job: Job, slot: Slot) -> None:
        machine = replace(self.machine, threads=self.machine.threads or slot.threads)
        arguments = worker_arguments(job.folder, machine, "--processes", str(slot.processes))
        try:
            console = open(job.folder / CONSOLE, "ab")  # noqa: SIM115
        except OSError:  # probably the disk is full; the worker will find and report the same problem
            console = open(os.devnull, "ab")  # noqa: SIM115
        with console:
            process = self._worker(slot, arguments, console)
        self._active.append(_Active(job, slot, process))
        if self.stopped:  # Ctrl-C while the worker was started, so `stop()` did not know it
            process.send_signal(signal.SIGTERM)
        job.slot, job.reason = slot.name, ""  # the previous failure was already reported
        self._change(job, "running")

    def _worker(self, slot: Slot, arguments: list[str], console: BinaryIO) -> Process:
        environment = {**os.environ, **slot.environment}
        if self.warm and can_fork(slot):
            server = self._servers.get(slot.name)
            if server is None or not server.alive:
                server = self._servers[slot.name] = WarmWorker(environment, console)
            server.start(arguments)
            return server
        return subprocess.Popen(
            [*WORKER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=environment,
            # A new session, so that Ctrl-C reaches only the launcher, which asks the workers to stop.
            start_new_session=True,
        )

    def _collect(self) -> Iterator[Job]:
        """Set the state of each job whose worker process has ended, and yield the job."""
        for active in list(self._active):
            code = active.process.poll()
            if code is None:
                continue
            self._active.remove(active)
            active.job.slot = ""
            self._set_state_after_exit(active.job, code)
            yield active.job

    def _set_state_after_exit(self, job: Job, code: int) -> None:
        """Set the state of a job from the exit code of its worker process."""
        # `state_of()` never raises, so a damaged run folder does not stop the other runs.
        state, status, note = state_of(job.folder)
        job.reason = status.reason if status else note
        if code < 0:
            append_attempt(job.folder, Attempt(code, killed_by(code)))
        # A negative exit code and the state "finished": the worker was killed after its run had finished.
        if code == EXIT_FINISHED or (code < 0 and state == "finished"):
            return self._change(job, "finished")
        if code == EXIT_DIVERGED or (code < 0 and state == "diverged"):
            return self._change(job, "diverged")
        if code == Busy.exit_code:
            return self._change(job, "elsewhere")
        if code < 0:
            job.reason = killed_by(code)
            if self.stopped:  # the user pressed Ctrl-C twice, so this launcher killed the worker
                return self._change(job, "interrupted")
        progressed = self._progressed(job, status)
        if code == EXIT_INTERRUPTED and (self.stopped or progressed):
            return self._change(job, "interrupted")
        job.failures += 1
        if code in NO_RETRY or job.failures > self.retries:
            job.reason = job.reason or f"the worker ended with exit code {code}; see {job.folder / CONSOLE}"
            return self._change(job, "failed")
        return self._change(job, "interrupted" if self.stopped else "again")

    def _progressed(self, job: Job, status: Status | None) -> bool:
        """Return whether the last attempt at a run got further than the attempt before it.

        It did if it reached a later training step, or ran out of memory and chose smaller micro-batches.
        """
        reached = (status.step if status else 0, RunFolder(job.folder).wanted_split())
        before = self._progress.get(job.folder, (-1, 0))
        self._progress[job.folder] = reached
        return reached > before

    def _change(self, job: Job, state: str) -> None:
        if job.state != state or state == "again":
            job.state = state
            self.events.changed(job)

    def stop(self, *_: object) -> None:
        """Ask every worker to write a checkpoint and exit; on the second call, kill the workers."""
        self._interrupts += 1
        self.stopped = True
        number = signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL
        for active in self._active:
            if active.process.poll() is None:
                active.process.send_signal(number)
