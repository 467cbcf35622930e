"""Prove on this machine that an interrupted run continues and ends with the same bytes.

A short version of an experiment runs twice without interruption, on the device, precision and file system of
the real runs. These two runs tell whether the device is deterministic. Then the run is interrupted in a step,
in a checkpoint and by the signals of schedulers, started again, and compared with the first run. Every run is
a separate worker process, as a launcher would start it.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
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
from oelm.runs.folder import RunFolder
from oelm.runs.states import EXIT_FINISHED, EXIT_INTERRUPTED
from oelm.training.signals import STOP_SIGNALS

STEPS, EVAL_EVERY = 6, 2  # validations and checkpoints after steps 2, 4 and 6
# Allowed difference on a device that is not deterministic, as a multiple of the difference between
# uninterrupted runs. Four runs are a small sample; a resume that loses state differs by orders of magnitude.
SPREAD_FACTOR = 10.0
_RUN_SECONDS = 3600.0  # a limit against hanging; loading a model from a slow disk takes minutes

CaseResult = Literal["equal", "within spread", "differs", "failed"]


@dataclass(frozen=True)
class Interruption:
    """When a run is interrupted, and by which signal."""

    moment: Literal["step", "checkpoint"]
    number: int  # the n-th step or checkpoint
    signal: signal.Signals
    resumes_after: int  # step of the checkpoint that the run must continue from; 0 = the beginning

    @property
    def graceful(self) -> bool:
        """Whether the run can write a checkpoint before it stops."""
        return self.signal != signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.signal.name} in {self.moment} {self.number}"


KILLS = (
    Interruption("step", 3, signal.SIGKILL, resumes_after=2),
    Interruption("checkpoint", 1, signal.SIGKILL, resumes_after=0),
    Interruption("checkpoint", 2, signal.SIGKILL, resumes_after=2),
    Interruption("step", 3, signal.SIGTERM, resumes_after=3),
)
# The signals of schedulers: all stop signals except that of Ctrl-C.
PREEMPTIONS = tuple(
    Interruption("step", 3, number, resumes_after=3) for number in STOP_SIGNALS if number != signal.SIGINT
)


@dataclass(frozen=True)
class Reference:
    """The uninterrupted runs: how long one takes, and how much they differ on this device."""

    seconds: float
    device: str
    precision: str
    spread: tuple[FileDifference, ...]  # between the first run and the others; () if deterministic

    @property
    def deterministic(self) -> bool:
        return not self.spread

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"deterministic": self.deterministic}


@dataclass(frozen=True)
class Case:
    """One interruption, and how the interrupted run compares with the uninterrupted one."""

    interruption: Interruption
    result: CaseResult
    problem: str = ""  # what went wrong, for the result "failed"
    stop_seconds: float | None = None  # from the signal to the end of the process
    resumed_after: int | None = None  # step it continued from; 0 = the beginning
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
    """A run behaved differently from what the check expects; the message says how."""


def short_run(config: RunConfig) -> RunConfig:
    """The experiment with its own model, method, precision and batch, for a few steps on a few rows."""
    budget = replace(
        config.budget,
        steps=STEPS,
        epochs=0,
        eval_every=EVAL_EVERY,
        log_every=1,
        checkpoint_every=0,
        patience=0,
    )
    # A finished tuning trial deletes its checkpoints, which are compared here.
    return replace(with_few_rows(config), budget=budget, tune=replace(config.tune, trial=False))


@contextlib.contextmanager
def resume_check(config: RunConfig, root: Path | str, machine: Machine) -> Iterator[ResumeCheck]:
    """A check of `config` in a temporary folder on the same file system as the runs folder `root`."""
    with tempfile.TemporaryDirectory(prefix=".oelm-doctor-", dir=existing_parent(Path(root))) as folder:
        yield ResumeCheck(short_run(config), Path(folder), replace(machine, trackers=()))


class ResumeCheck:
    """Call `reference` first, then `case` for each interruption."""

    def __init__(self, config: RunConfig, place: Path, machine: Machine) -> None:
        self.config, self.place, self.machine = config, place, machine
        self.spread: tuple[FileDifference, ...] = ()
        self.cases = 0

    def reference(self) -> Reference:
        """Run twice without interruption, and twice more if the two differ; OelmError if a run fails."""
        first, _ = self._uninterrupted(1)
        second, seconds = self._uninterrupted(2)
        spread = compare_runs(first.path, second.path)
        if spread:
            for number in (3, 4):
                other, _ = self._uninterrupted(number)
                spread += compare_runs(first.path, other.path)
        self.spread = tuple(spread)
        manifest = first.manifest()
        device = self.machine.device
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Reference(seconds, device, manifest.precision.dtype if manifest else "", self.spread)

    def _uninterrupted(self, number: int) -> tuple[RunFolder, float]:
        """Run without interruption; returns the folder and the seconds it took."""
        folder = self._claim(f"uninterrupted-{number}")
        begin = time.monotonic()
        code = _exit_code(self._start(folder))
        if code != EXIT_FINISHED:
            raise OelmError(
                f"{self.config.id}: the uninterrupted run failed, so there is nothing to compare with. "
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
        """Start the run and interrupt it; returns the seconds from the signal to its end."""
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
            raise _Failed(f"exit code {code} instead of {expected}. {self._reason(folder, code)}")
        status = folder.status()
        if interruption.graceful and (status is None or status.state != "interrupted"):
            raise _Failed(f"the state is '{status.state if status else 'missing'}', not 'interrupted'")
        return seconds

    def _resume(self, folder: RunFolder, interruption: Interruption) -> int:
        """Start the run again; returns the step of the checkpoint that it continued from."""
        from oelm.training.checkpoints.file import load_checkpoint

        step = load_checkpoint(folder.latest)["progress"]["step"] if folder.latest.exists() else 0
        if step != interruption.resumes_after:
            raise _Failed(f"latest.pt has step {step}, not step {interruption.resumes_after}")
        code = _exit_code(self._start(folder))
        if code != EXIT_FINISHED:
            raise _Failed(f"the restarted run did not finish. {self._reason(folder, code)}")
        status = folder.status()
        if step and (status is None or status.resumes != 1):
            raise _Failed(f"the restarted run ignored the checkpoint of step {step}")
        return int(step)

    def _start(self, folder: RunFolder, *moment: str) -> subprocess.Popen[bytes]:
        command = worker_command(folder.path, self.machine)
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
    """Compare the differences of an interrupted run with those between uninterrupted runs (`spread`)."""
    if not differences:
        return "equal"
    # A few runs are a small sample, so all losses share one limit, and all weights and optimizer states too.
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
    """Wait for the process to end; kill it if the check itself is interrupted."""
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
            raise _Failed(f"the run ended with exit code {code} before it could be interrupted")
        if time.monotonic() > end:
            raise _Failed(f"after {_RUN_SECONDS / 3600:g} hours, the run had not reached the interruption")
        time.sleep(0.01)
