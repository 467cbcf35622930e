"""One benchmark arm in its own process: `python -m oelm.bench.worker SPEC`, SPEC as JSON.

SPEC["build"] names a function ("module:function") that returns an `Arm`. The worker reads one JSON command
per line: {"steps": n} runs n consecutive steps and answers with the seconds of each; {"memory": true} answers
with the peak memory. Prints of libraries go to standard error, so that they are not taken for an answer.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Runs the loop of another library (the Trainer); it must call `turns.step_begins` and `turns.step_ended`.
OwnLoop = Callable[["Turns"], None]


@dataclass
class Arm:
    """What a worker runs: `step` does one whole optimizer step and waits until the device has finished it."""

    step: Callable[[], object] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)
    memory: Callable[[], dict[str, int]] = dict  # bytes beyond the process's own peak
    own_loop: OwnLoop | None = None


class Turns:
    """Answers commands between turns, and clocks the steps within one."""

    def __init__(self, answers: Any, memory: Callable[[], dict[str, int]]) -> None:
        self._answers, self._memory = answers, memory
        self._left, self._seconds, self._began = 0, [], 0.0  # type: ignore[var-annotated]

    def answer(self, value: dict[str, Any]) -> None:
        print(json.dumps(value), file=self._answers, flush=True)

    def wait(self) -> bool:
        """Block until the next turn is asked for; False when the benchmark is over."""
        for line in sys.stdin:
            command = json.loads(line)
            if "steps" in command:
                self._left, self._seconds = command["steps"], []
                return True
            self.answer(self._memory())
        return False

    def step_begins(self) -> None:
        if not self._left and not self.wait():
            os._exit(0)  # a loop that is not ours cannot be left in the middle of a step
        self._began = time.perf_counter()

    def step_ended(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        self._left -= 1
        if not self._left:
            self.answer({"seconds": self._seconds})

    def commands(self) -> Iterator[None]:
        while self.wait():
            yield


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])
    module, _, function = spec["build"].partition(":")
    arm: Arm = getattr(importlib.import_module(module), function)(spec)
    turns = Turns(answers, lambda: {"peak_bytes": peak_bytes(), **arm.memory()})
    turns.answer(arm.facts)
    if arm.own_loop is not None:
        arm.own_loop(turns)
        return
    for _ in turns.commands():
        while turns._left:
            turns.step_begins()
            arm.step()
            turns.step_ended()


def peak_bytes() -> int:
    """Peak memory of this process. Linux' own count: getrusage's begins with that of the parent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
