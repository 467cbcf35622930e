"""Run one arm of a benchmark (a method or tool to measure) in a process of its own.

The command is `python -m oelm.bench.worker SPEC`, where SPEC is JSON. SPEC["build"] names a function
("module:function") that returns an `Arm`. The worker reads one JSON command per line from standard input:
{"steps": n} runs n consecutive steps and prints the seconds of each; {"memory": true} prints the peak memory.
Everything that libraries print goes to standard error, so that the parent process does not read it as an
answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oelm.cores import peak_memory

#: A function that runs the training loop of another library, such as the Hugging Face Trainer. It must call
#: `turns.step_begins()` and `turns.step_ended()` at every step.
OwnLoop = Callable[["Turns"], None]


@dataclass
class Arm:
    """One arm of a benchmark (a method or tool to measure), as a worker process runs it.

    step:     does one whole optimizer step and waits until the device has finished it
    facts:    what the arm reports once it is built, such as parameter counts
    memory:   returns additional byte counts; "peak_bytes", if given, replaces the peak memory of the process
    own_loop: replaces `step` if another library's training loop runs the steps
    """

    step: Callable[[], object] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)
    memory: Callable[[], dict[str, int]] = dict
    own_loop: OwnLoop | None = None


class Turns:
    """Measures the steps of each turn (consecutive steps of one arm), and answers commands between turns."""

    def __init__(self, answers: Any, memory: Callable[[], dict[str, int]]) -> None:
        self._answers, self._memory = answers, memory
        self._left, self._seconds, self._began = 0, [], 0.0  # type: ignore[var-annotated]

    def answer(self, value: dict[str, Any]) -> None:
        print(json.dumps(value), file=self._answers, flush=True)

    def wait(self) -> bool:
        """Wait for the next command to run steps; return False if standard input was closed instead."""
        for line in sys.stdin:
            command = json.loads(line)
            if "steps" in command:
                self._left, self._seconds = command["steps"], []
                return True
            self.answer(self._memory())
        return False

    def step_begins(self) -> None:
        if not self._left and not self.wait():
            os._exit(0)  # another library's loop cannot be stopped from inside a step, so the process exits
        self._began = time.perf_counter()

    def step_ended(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        self._left -= 1
        if not self._left:
            self.answer({"seconds": self._seconds})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])
    module, _, function = spec["build"].partition(":")
    arm: Arm = getattr(importlib.import_module(module), function)(spec)
    turns = Turns(answers, lambda: {"peak_bytes": peak_memory(), **arm.memory()})
    turns.answer(arm.facts)
    if arm.own_loop is not None:
        arm.own_loop(turns)
        return
    while turns.wait():
        while turns._left:
            turns.step_begins()
            arm.step()
            turns.step_ended()


if __name__ == "__main__":
    main()
