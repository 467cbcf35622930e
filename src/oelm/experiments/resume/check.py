"""Check on this machine that an interrupted and restarted run writes the same bytes as an uninterrupted one.

A short version of an experiment runs twice without interruption, with the device, precision and file system
of the real runs. These two runs show whether the device is deterministic. In each case of the check, the same
short run is interrupted in a training step or while it writes a checkpoint, started again, and compared with
the first uninterrupted run. Every run is a separate worker process, as a launcher would start it.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from oelm.config.run_config import Machine, RunConfig
from oelm.errors import OelmError
from oelm.experiments.doctor import existing_parent, with_few_rows
from oelm.experiments.launch.worker import worker_command
from oelm.experiments.resume.compare_runs import FileDifference, compare_runs
from oelm.files.temporary import temporary_folder
from oelm.runs.folder import RunFolder
from oelm.runs.states import EXIT_FINISHED, EXIT_INTERRUPTED
from oelm.training.signals import STOP_SIGNALS

STEPS, EVAL_EVERY = 6, 2  # the short run validates and writes a checkpoint after steps 2, 4 and 6
# On a device that is not deterministic, a resumed run may differ by this many times the largest difference
# between uninterrupted runs. The limit is generous, because only four uninterrupted runs are compared, and
# because a resumed run that lost state differs by orders of magnitude.
SPREAD_FACTOR = 10.0
_FOLDER = ".oelm-doctor-"  # start of the name of the temporary folder
_RUN_SECONDS = 3600.0  # a short run that takes longer counts as hung; slow disks are allowed for

CaseResult = Literal["equal", "within spread", "differs", "failed"]


@dataclass(frozen=True)
class Interruption:
    """The moment at which a run is interrupted, and the signal that interrupts it."""

    moment: Literal["step", "checkpoint"]
    number: int  # number of the step or checkpoint, from 1
    signal: signal.Signals
    resumes_after: int  # step of the checkpoint that the run must continue from; 0 = the beginning

    @property
    def graceful(self) -> bool:
        """Whether the signal lets the run write a checkpoint before it stops."""
        return self.signal != signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.signal.name} in {self.moment} {self.number}"


KILLS = (
    Interruption("step", 3, signal.SIGKILL, resumes_after=2),
    Interruption("checkpoint", 1, signal.SIGKILL, resumes_after=0),
    Interruption("checkpoint", 2, signal.SIGKILL, resumes_after=2),
    Interruption("step", 3, signal.SIGTERM, resumes_after=3),
)
# Schedulers stop a run with one of these signals: all stop signals except SIGINT, which is Ctrl-C.
PREEMPTIONS = tuple(
    Interruption("step", 3, number, resumes_after=3) for number in STOP_SIGNALS if number != signal.SIGINT
)


@dataclass(frozen=True)
class Reference:
    """The uninterrupted runs: how long one takes, and how much they differ from each other on this device."""

    seconds: float
    device: str
    precision: str
    spread: tuple[FileDifference, ...]  # how the other runs differ from the first; () if deterministic

    @property
    def deterministic(self) -> bool:
        return not self.spread

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"deterministic": self.deterministic}


@dataclass(frozen=True)
class Case:
    """The result of one case: how a run with this interruption compares with the first uninterrupted run."""

    interruption: Interruption
    result: CaseResult
    problem: str = ""  # what went wrong if the result is "failed"
    stop_seconds: float | None = None  # time from the signal to the end of the process
    resumed_after: int | None = None  # step of the checkpoint that the run continued from; 0 = the beginning
    differences: tuple[FileDifference, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return self.result in ("equal", "within spread")

    def to_dict(self) -> dict[str, Any]:
        return {
            "moment": self.interruption.moment,
            "number": self.interruption.number,
            "signal": self.interruption.signal.name,
            "ok": self.ok,
            "result": self.result,
            "problem": self.problem,
            "stop_seconds": self.stop_seconds,
            "resumed_after": self.resumed_after,
            "differences": [difference.to_dict() for difference in self.differences],
        }


class _Failed(Exception):
    """Raised if a run does not behave as the check expects; the message says what it did."""


def short_run(config: RunConfig) -> RunConfig:
    """Return `config` limited to a few steps and rows, with the same model, method and batch size."""
    budget = replace(
        config.budget,
        steps=STEPS,
        epochs=0,
        eval_every=EVAL_EVERY,
        log_every=1,
        checkpoint_every=0,
        patience=0,
    )
    return replace(with_few_rows(config), budget=budget)


@contextlib.contextmanager
def resume_check(config: RunConfig, root: Path | str, machine: Machine) -> Iterator[ResumeCheck]:
    """Yield a resume check of `config` that works in a temporary folder on the file system of `root`.

    root: the runs folder; the check also covers its file system
    """
    place = existing_parent(Path(root))
    with temporary_folder(place, _FOLDER) as folder:
        yield ResumeCheck(short_run(config), folder, replace(machine, trackers=()))


class ResumeCheck:
    """A resume check of one config: call `reference()` first, then `case()` for each interruption."""

    def __init__(self, config: RunConfig, place: Path, machine: Machine) -> None:
        self.config, self.place, self.machine = config, place, machine
        self.spread: tuple[FileDifference, ...] = ()
        self.cases = 0

    def reference(self) -> Reference:
        """Run the config twice without interruption, and twice more if these two runs differ.

        Returns how long one run takes and how much the runs differ. Raises OelmError if a run fails.
        """
        from oelm.training.parallel.world import choose_device

        first, _ = self._uninterrupted(1)
        second, seconds = self._uninterrupted(2)
        spread = compare_runs(first.path, second.path)
        if spread:
            for number in (3, 4):
                other, _ = self._uninterrupted(number)
                spread += compare_runs(first.path, other.path)
        self.spread = tuple(spread)
        manifest, device = first.manifest(), str(choose_device(self.machine.device))
        return Reference(seconds, device, manifest.precision.dtype if manifest else "", self.spread)

    def _uninterrupted(self, number: int) -> tuple[RunFolder, float]:
        """Run the config once without interruption; return the run folder and the seconds that this took."""
        folder = self._claim(f"uninterrupted-{number}")
        begin = time.monotonic()
        code = _exit_code(self._start(folder))
        if code != EXIT_FINISHED:
            raise OelmError(
                f"{self.config.id}: a run without interruption failed, so resuming cannot be checked. "
                f"{self._reason(folder, code)}"
            )
        return folder, time.monotonic() - begin

    def case(self, interruption: Interruption) -> Case:
        """Interrupt a run, start it again, and compare it with the first uninterrupted run."""
        self.cases += 1
        folder = self._claim(f"interrupted-{self.cases}")
        stop_seconds: float | None = None
        resumed_after: int | None = None
        try:
            stop_seconds = self._interrupt(folder, interruption)
            resumed_after = self._resume(folder, interruption)
            differences = tuple(compare_runs(self.place / "uninterrupted-1", folder.path))
        except (_Failed, OelmError) as failure:
            return Case(interruption, "failed", str(failure), stop_seconds, resumed_after)
        return Case(
            interruption,
            judge(differences, self.spread),
            stop_seconds=stop_seconds,
            resumed_after=resumed_after,
            differences=differences,
        )

    def _claim(self, name: str) -> RunFolder:
        folder = RunFolder(self.place / name)
        folder.claim(self.config)
        return folder

    def _interrupt(self, folder: RunFolder, interruption: Interruption) -> float:
        """Start the run, interrupt it, and return the seconds from the signal to the end of the process."""
        marker = folder.path.with_suffix(".reached")
        moment = (interruption.moment, str(interruption.number), str(marker))
        process = self._start(folder, *moment)
        try:
            _wait_for(marker, process)
            begin = time.monotonic()
            process.send_signal(interruption.signal)
            marker.unlink(missing_ok=True)
        except BaseException:
            _end(process)
            raise
        code = _exit_code(process)
        seconds = time.monotonic() - begin
        expected = EXIT_INTERRUPTED if interruption.graceful else -int(interruption.signal)
        if code != expected:
            raise _Failed(
                f"the interrupted run ended with exit code {code} instead of {expected}. "
                f"{self._reason(folder, code)}"
            )
        status = folder.status()
        if interruption.graceful and (status is None or status.state != "interrupted"):
            state = f"is '{status.state}'" if status else "is missing"
            raise _Failed(f"after the interruption, the state in status.json {state}, not 'interrupted'")
        return seconds

    def _resume(self, folder: RunFolder, interruption: Interruption) -> int:
        """Start the interrupted run again; return the step of the checkpoint that it continued from."""
        from oelm.training.checkpoints.file import load_checkpoint

        step = load_checkpoint(folder.latest)["progress"]["step"] if folder.latest.exists() else 0
        if step != interruption.resumes_after:
            raise _Failed(
                f"after the interruption, latest.pt is the checkpoint of step {step}, "
                f"not of step {interruption.resumes_after}"
            )
        code = _exit_code(self._start(folder))
        if code != EXIT_FINISHED:
            raise _Failed(f"the restarted run did not finish. {self._reason(folder, code)}")
        status = folder.status()
        if step and (status is None or status.resumes != 1):
            raise _Failed(f"the restarted run ignored the checkpoint of step {step}")
        return int(step)

    def _start(self, folder: RunFolder, *moment: str) -> subprocess.Popen[bytes]:
        command = worker_command(folder.path, self.machine, "--keep-checkpoints")
        if moment:
            command = [sys.executable, "-m", "oelm.experiments.resume.interrupt_at", *moment, *command[3:]]
        with open(_console(folder), "ab") as console:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def _reason(self, folder: RunFolder, code: int) -> str:
        status = folder.status()
        if status is not None and status.reason:
            return f"{status.state}: {status.reason}"
        lines = _console(folder).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code} without a message"


def judge(differences: Sequence[FileDifference], spread: Sequence[FileDifference]) -> CaseResult:
    """Return how an interrupted run compares with the first uninterrupted run.

    differences: differences between these two runs
    spread: differences between uninterrupted runs, which show how much this device varies by itself
    """
    if not differences:
        return "equal"
    # Four uninterrupted runs are too few for a separate limit per file. So there is one limit for all files
    # with numbers (losses), and one for all files with tensors (weights and optimizer states).
    limits = dict.fromkeys(("numbers", "tensors"), 0.0)
    for difference in spread:
        kind = _kind(difference)
        limits[kind] = max(limits[kind], SPREAD_FACTOR * (difference.largest or 0.0))
    others = {difference.file for difference in spread if difference.others}
    for difference in differences:
        if difference.others and difference.file not in others:
            return "differs"
        if (difference.largest or 0.0) > limits[_kind(difference)] or not spread:
            return "differs"
    return "within spread"


def _kind(difference: FileDifference) -> str:
    return "numbers" if difference.file.endswith((".json", ".jsonl")) else "tensors"


def _console(folder: RunFolder) -> Path:
    return folder.path.with_suffix(".console")


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait until a process ends and return its exit code; kill the process if the wait is interrupted."""
    try:
        return process.wait(_RUN_SECONDS)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _wait_for(marker: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _RUN_SECONDS
    while not marker.exists():
        code = process.poll()
        if code is not None:
            raise _Failed(f"the run ended with exit code {code} before the planned interruption")
        if time.monotonic() > end:
            hours = _RUN_SECONDS / 3600
            raise _Failed(f"the run did not reach the planned interruption within {hours:g} hours")
        time.sleep(0.01)
