"""Many runs on this machine: a process per run, a slot per process, until every run has an end.

Idempotent. What is finished is skipped, what was interrupted goes on, what fails is tried again a bounded
number of times, what another launcher works on is waited for (and taken over should that one die). The
run folders are the only memory: a killed launcher is replaced by the same command.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.config.run_config import Machine, RunConfig
from oelm.experiments.catalogue import for_workers
from oelm.experiments.launch.ranks import killed_by
from oelm.experiments.launch.slots import Slot
from oelm.experiments.launch.worker import COMMAND, CONSOLE, machine_words, note_attempt
from oelm.runs.folder import EXIT_DIVERGED, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, RunFolder, run_path
from oelm.runs.lock import Busy, RunLock, is_held
from oelm.runs.scan import state_of
from oelm.training.signals import signals_to_handle

RETRIES = 2
_POLL_SECONDS = 0.2
_ELSEWHERE_SECONDS = 2.0  # how often a run that another launcher works on is looked at


@dataclass
class Job:
    """One run on its way through a launcher."""

    config: RunConfig
    folder: Path
    state: str = "pending"
    reason: str = ""
    failures: int = 0
    reached: tuple[int, int] = (
        -1,
        0,
    )  # step, and micro-batches cut: an attempt that got further did not fail
    slot: str = ""
    earlier: bool = False  # it had ended before this launch

    @property
    def name(self) -> str:
        c = self.config
        trial = f" lr={c.optim.lr:g}" if c.tune.trial else ""
        return f"{c.id} {c.scale}{trial} seed {c.seed}"

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "diverged", "failed")


@dataclass
class Events:
    """What a launcher tells the one who watches. Each is optional."""

    changed: Callable[[Job], None] = lambda job: None
    tick: Callable[[Sequence[Job]], None] = lambda jobs: None


@dataclass
class _Active:
    job: Job
    slot: Slot
    process: subprocess.Popen[bytes] = field(repr=False)


def prepare(configs: Iterable[RunConfig], root: Path | str, *, again: bool = False) -> list[Job]:
    """Claim a folder for every run, refused when one holds another config. `again`: open those that
    diverged once more."""
    jobs = []
    for config in configs:
        folder = RunFolder(run_path(root, config))
        folder.claim(config)
        if again and not config.tune.trial:  # a rate that diverged is the answer to a trial's question
            _reopen(folder)
        jobs.append(Job(config, folder.path))
    return jobs


def _reopen(folder: RunFolder) -> None:
    """A diverged run becomes one to be gone on with, from its last checkpoint."""
    if state_of(folder.path)[0] != "diverged":
        return
    with contextlib.suppress(Busy), RunLock(folder.path, patience=0):
        status = folder.status()
        if status is not None and status.state == "diverged":
            reason = f"to be tried again after it diverged: {status.reason}"
            folder.write_status(replace(status, state="interrupted", reason=reason))


def settled_earlier(job: Job, events: Events) -> bool:
    """Whether an earlier launch brought the run to its end."""
    state, status, _ = state_of(job.folder, verify=True)
    job.earlier = state in ("finished", "diverged")
    if job.earlier:
        job.state, job.reason = state, status.reason if status else ""
        events.changed(job)
    return job.earlier


class LocalLauncher:
    """Runs jobs in `slots` of this machine. `launch` returns when each has ended or the user stopped it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        machine: Machine,
        *,
        retries: int = RETRIES,
        events: Events | None = None,
    ) -> None:
        self.slots = list(slots)
        self.machine = machine
        self.retries = retries
        self.events = events or Events()
        self.stopped = False
        self._active: list[_Active] = []
        self._interrupts = 0

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
        waiting = deque(job for job in jobs if not settled_earlier(job, self.events))
        elsewhere: deque[tuple[float, Job]] = deque()
        with self._signals():
            while (waiting or elsewhere or self._active) and not (self.stopped and not self._active):
                for done in self._collect():
                    if not done.ended and not self.stopped:
                        if done.state == "elsewhere":
                            elsewhere.append((time.monotonic(), done))
                        else:
                            waiting.append(done)
                self._recall(elsewhere, waiting)
                self._fill(waiting, elsewhere)
                self.events.tick(jobs)
                time.sleep(_POLL_SECONDS)
        return jobs

    def _settled(self, job: Job) -> bool:
        """Whether another launcher has brought the run to its end meanwhile."""
        state, status, note = state_of(job.folder)
        if state in ("finished", "diverged"):
            job.reason = note or (status.reason if status else "")
            self._change(job, state)
            return True
        return False

    def _fill(self, waiting: deque[Job], elsewhere: deque[tuple[float, Job]]) -> None:
        taken = {active.slot.name for active in self._active}
        free = [slot for slot in self.slots if slot.name not in taken]
        while free and waiting and not self.stopped:
            job = waiting.popleft()
            if is_held(job.folder):
                self._change(job, "elsewhere")
                elsewhere.append((time.monotonic(), job))
                continue
            if self._settled(job):  # another launcher may have finished it since
                continue
            self._start(job, free.pop(0))

    def _recall(self, elsewhere: deque[tuple[float, Job]], waiting: deque[Job]) -> None:
        """Look again at what others worked on: finished, or abandoned and to be gone on with."""
        while elsewhere and time.monotonic() - elsewhere[0][0] > _ELSEWHERE_SECONDS:
            _, job = elsewhere.popleft()
            if self._settled(job):
                continue
            if is_held(job.folder):
                elsewhere.append((time.monotonic(), job))
            else:
                waiting.append(job)

    def _start(self, job: Job, slot: Slot) -> None:
        machine = replace(self.machine, threads=self.machine.threads or slot.threads)
        command = [sys.executable, "-m", "oelm.experiments.launch.worker", str(job.folder)]
        command += ["--machine", machine_words(machine), "--processes", str(slot.processes)]
        with open(job.folder / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, **for_workers(), **slot.environment, COMMAND: shlex.join(sys.argv)},
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which asks workers to checkpoint
            )
        self._active.append(_Active(job, slot, process))
        job.slot, job.reason = slot.name, ""  # what ended the last attempt was said when it did
        self._change(job, "running")

    def _collect(self) -> Iterator[Job]:
        for active in list(self._active):
            code = active.process.poll()
            if code is None:
                continue
            self._active.remove(active)
            active.job.slot = ""
            self._judge(active.job, code)
            yield active.job

    def _judge(self, job: Job, code: int) -> None:
        state, status, note = state_of(job.folder)  # never raises: one broken folder must not end the others
        job.reason = status.reason if status else note
        if code < 0:
            note_attempt(job.folder, code, killed_by(code))
        if code == EXIT_FINISHED or (code < 0 and state == "finished"):  # killed after its last word
            return self._change(job, "finished")
        if code == EXIT_DIVERGED or (code < 0 and state == "diverged"):
            return self._change(job, "diverged")
        if code == Busy.exit_code:
            return self._change(job, "elsewhere")
        if code < 0:
            job.reason = killed_by(code)
            if self.stopped:  # by this launcher
                return self._change(job, "interrupted")
        reached = (status.step if status else 0, RunFolder(job.folder).wanted_split())
        progress, job.reached = reached > job.reached, reached
        if code == EXIT_INTERRUPTED and (self.stopped or progress):
            return self._change(job, "interrupted")
        job.failures += 1
        if code == EXIT_USAGE or job.failures > self.retries:
            job.reason = job.reason or f"exit code {code}; see {job.folder / CONSOLE}"
            return self._change(job, "failed")
        return self._change(job, "interrupted" if self.stopped else "again")

    def _change(self, job: Job, state: str) -> None:
        if job.state != state or state == "again":
            job.state = state
            self.events.changed(job)

    # -- stopping -------------------------------------------------------------------------------

    def stop(self, *_: object) -> None:
        """Ask every worker to checkpoint and leave; asked again, end them (the last checkpoint holds)."""
        self._interrupts += 1
        self.stopped = True
        number = signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL
        for active in self._active:
            if active.process.poll() is None:
                active.process.send_signal(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
            yield
            return
        handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} & set(signals_to_handle())
        old = {n: signal.signal(n, self.stop) for n in handled}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def exit_code(jobs: Sequence[Job]) -> int:
    """0 when all finished; 75 when some only wait to be continued; 1 when any failed or diverged.

    A rate of a grid that diverges is an answer, not a failure."""
    states = {job.state for job in jobs if not (job.state == "diverged" and job.config.tune.trial)}
    if states & {"failed", "diverged"}:
        return 1
    return 0 if states <= {"finished"} else EXIT_INTERRUPTED
