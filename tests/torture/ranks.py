"""Kill one process of a run that uses two ranks: all must end, and the same command must finish the run.

Each of these processes imports torch, which takes about ten seconds per run, so the short form leaves these
cases out. The test suite has tests/experiments/launch/test_two_processes.py instead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from .arena import Arena
from .driver import Case, Wrong, _in_child

TARGETS = ("rank 0", "rank 1", "worker", "launcher")
_SECONDS = 300.0  # limit for everything that is waited for here, generous for a busy machine


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield all cases if `count` is 0, none otherwise."""
    names = [f"{target}:SIGKILL:{number}" for number in range(4) for target in TARGETS]
    names += [f"{target}:SIGTERM:{number}" for number in range(2) for target in TARGETS]
    for name in () if count else names:
        yield case(arena, name)


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name: TARGET:SIGNAL:NUMBER.

    The signal is sent to the process TARGET after the first checkpoint and NUMBER more.
    """
    target, signal_name, number = name.split(":")
    act = functools.partial(_killed, arena, target, signal.Signals[signal_name], int(number))
    return Case("ranks", name, act)


def _killed(arena: Arena, target: str, number: signal.Signals, times: int, place: Path) -> str:
    from oelm.experiments.resume.compare_runs import compare_runs
    from oelm.runs.folder import RunFolder
    from oelm.runs.scan import state_of

    reference = _reference(arena)
    folder = RunFolder(_claim(arena, place))
    start = _start_launcher if target == "launcher" else _start_worker
    top = start(arena, folder.path)
    try:
        _until(lambda: folder.latest.exists(), "the first checkpoint", top)
        seen = folder.latest.stat().st_mtime_ns
        for _ in range(times):
            _until(lambda before=seen: folder.latest.stat().st_mtime_ns != before, "a checkpoint", top)
            seen = folder.latest.stat().st_mtime_ns
        family = [top, *top.children(recursive=True)]
        _find(target, top).send_signal(number)
        if target == "launcher" and number == signal.SIGKILL:
            _until(lambda: not _living(family[1:]), "the end of the worker of a killed launcher")
        _until(lambda: not _living(family), "the end of all processes")
    except psutil.NoSuchProcess:
        return "had finished"
    finally:
        left = _living([top, *_children(top)])
        for process in left:
            process.kill()
    # A process counts as ended a moment before its last thread has closed the file of the run's lock.
    _until(lambda: state_of(folder.path)[0] not in ("running", "stalled"), "a state other than running")
    state, status, _ = state_of(folder.path)
    if number == signal.SIGTERM and state not in ("interrupted", "finished"):
        raise Wrong(f"SIGTERM to {target} led to {state}: {status.reason if status else ''}")
    if (code := _wait(_start_worker(arena, folder.path))) != 0:
        raise Wrong(f"the resumed run ended with exit code {code}: {_console(folder.path)}")
    if differences := compare_runs(reference, folder.path):
        raise Wrong("the result differs from an undisturbed run: " + "; ".join(map(str, differences)))
    return f"{state}, then equal"


@functools.cache
def _reference(arena: Arena) -> Path:
    folder = _claim(arena, arena.place / "reference-ranks")
    if (code := _wait(_start_worker(arena, folder))) != 0:
        raise RuntimeError(f"an undisturbed run with two ranks ended with {code}: {_console(folder)}")
    return folder


def _claim(arena: Arena, root: Path) -> Path:
    from oelm.experiments.launch.jobs import make_jobs
    from oelm.runs.folder import RunFolder

    held = RunFolder(arena.reference("lm")).config()
    budget = replace(held.budget, steps=60, eval_every=30, checkpoint_every=5)
    (job,) = make_jobs([replace(held, budget=budget)], root)
    return job.folder


def _machine(arena: Arena) -> Any:
    from oelm.config.run_config import Machine

    return Machine(device="cpu", threads=1, cache_dir=str(arena.cache))


def _start_worker(arena: Arena, folder: Path) -> psutil.Popen:
    from oelm.experiments.launch.worker import machine_to_json

    words = ["--machine", machine_to_json(_machine(arena)), "--processes", "2"]
    with open(folder / "console.log", "ab") as console:
        return psutil.Popen(
            [sys.executable, "-m", "oelm.experiments.launch.worker", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )


def _start_launcher(arena: Arena, folder: Path) -> psutil.Process:
    """Start a process with a LocalLauncher that has one slot with two ranks."""

    def launch() -> int:
        from oelm.experiments.launch.jobs import Job, exit_code
        from oelm.experiments.launch.local import LocalLauncher
        from oelm.experiments.launch.slots import make_slots
        from oelm.runs.folder import RunFolder

        slots = [replace(slot, processes=2) for slot in make_slots(1, gpus="none", slots=1, threads=1)]
        job = Job(RunFolder(folder).config(), folder)
        return exit_code(LocalLauncher(slots, _machine(arena), retries=0).launch([job]))

    pid = os.fork()
    if pid == 0:
        _in_child(launch, folder / "launcher.log")
    return psutil.Process(pid)


def _find(target: str, top: psutil.Process) -> psutil.Process:
    if target in ("worker", "launcher"):
        return top
    rank = target.split()[1]
    found: list[psutil.Process] = []

    def look() -> bool:
        for process in top.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == rank:
                    found.append(process)
        return bool(found)

    _until(look, f"a process of rank {rank}", top)
    return found[-1]


def _children(top: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(top.children(recursive=True))
    return []


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those processes that still run; collect those of our child processes that have ended."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _until(condition: Callable[[], bool], what: str, top: psutil.Process | None = None) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > end:
            raise Wrong(f"{_SECONDS:g} s passed without {what}")
        if top is not None and not _living([top]):
            raise psutil.NoSuchProcess(top.pid)
        time.sleep(0.01)


def _wait(process: psutil.Popen) -> int:
    try:
        return int(process.wait(_SECONDS))
    except psutil.TimeoutExpired:
        for child in [process, *_children(process)]:
            child.kill()
        raise Wrong(f"a run with two ranks hangs: no end within {_SECONDS:g} s") from None


def _console(folder: Path) -> str:
    return (folder / "console.log").read_text(errors="replace")[-2000:]
