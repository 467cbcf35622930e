"""Faults that `oelm doctor --resume` must find: a resume that is broken on purpose, an unsteady device.

It must also report no fault if nothing is broken.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .arena import Arena
from .driver import Case, Wrong, _in_child

BREAKAGES: dict[str, str] = {  # what is broken in the worker processes -> the result that doctor must report
    "nothing": "equal",
    "random state not restored": "differs",
    "checkpoint ignored": "failed",
    "device not deterministic": "within spread",
}


def cases(arena: Arena, count: int) -> Iterator[Case]:
    """Yield one case per fault; ignores `count`."""
    for name in BREAKAGES:
        yield case(arena, name)


def case(arena: Arena, name: str) -> Case:
    """Return the case with this name, which is a key of BREAKAGES."""
    return Case("doctor", name, lambda place: _checked(arena, name, place))


def _checked(arena: Arena, name: str, place: Path) -> str:
    from oelm.config.run_config import Machine
    from oelm.experiments.resume.check import KILLS, PREEMPTIONS, ResumeCheck, short_run
    from oelm.runs.folder import RunFolder

    class Forked(ResumeCheck):
        def _start(self, folder: RunFolder, *moment: str) -> Any:
            return _Process(
                lambda: _worker(name, folder.path, machine, moment), folder.path.with_suffix(".console")
            )

    held = RunFolder(arena.reference("cls")).config()
    config = replace(short_run(held), model=replace(held.model, dropout=0.1))
    machine = Machine(device="cpu", threads=1, cache_dir=str(arena.cache))
    check = Forked(config, place, machine)
    reference = check.reference()
    if reference.deterministic != (name != "device not deterministic"):
        raise Wrong(f"doctor reports deterministic={reference.deterministic}: {reference.spread}")
    if not reference.deterministic and reference.spread[0].step != 2:
        raise Wrong(f"doctor does not report step 2 as the first that differs: {reference.spread}")
    interruptions = KILLS[:1] if arena.short else (KILLS[0], KILLS[3])
    if name == "nothing":
        interruptions = KILLS if arena.short else KILLS + PREEMPTIONS
    for interruption in dict.fromkeys(interruptions):
        found = check.case(interruption)
        if found.result != BREAKAGES[name]:
            raise Wrong(f"{interruption}: doctor reports {found}, not '{BREAKAGES[name]}'")
    return "reported correctly"


def _worker(name: str, folder: Path, machine: Any, moment: tuple[str, ...]) -> int:
    import torch

    from oelm.experiments.launch import worker
    from oelm.experiments.resume import interrupt_at
    from oelm.training import loop
    from oelm.training.checkpoints import resume
    from oelm.training.checkpoints.file import NewestCheckpoint

    if name == "random state not restored":
        resume.set_random_state = lambda *_: None
    if name == "checkpoint ignored":
        resume.load_newest = lambda *_: NewestCheckpoint(None)
    if name == "device not deterministic":
        take_step = loop.take_step

        def unsteady(this: Any) -> None:
            take_step(this)
            noise = torch.Generator().manual_seed(time.monotonic_ns())
            with torch.no_grad():
                for tensor in (p for p in this.learner.model.parameters() if p.requires_grad):
                    tensor.add_(torch.randn(tensor.shape, generator=noise), alpha=1e-6)

        loop.take_step = unsteady
    words = [*moment, str(folder), "--machine", worker.machine_to_json(machine), "--keep-checkpoints"]
    return interrupt_at.main(words) if moment else worker.main(words)


class _Process:
    """A forked process with those methods of subprocess.Popen that the check uses.

    A fork does not have to import torch again.
    """

    def __init__(self, action: Callable[[], int], log: Path) -> None:
        sys.stdout.flush()
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            _in_child(action, log)

    def poll(self) -> int | None:
        if self.code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, timeout: float = 60.0) -> int:
        while self.poll() is None:
            time.sleep(0.005)
        return self.code  # type: ignore[return-value]

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
