"""Run one arm of a benchmark (a method or tool to measure) in a process of its own.

The command is `python -m oelm.bench.worker SPEC`, where SPEC is JSON. SPEC["build"] names a function
("module:function") that returns an `Arm`. The worker reads one JSON command per line from standard input:
{"steps": n} runs n consecutive steps and prints the seconds of each; {"memory": true} prints the peak memory.
If SPEC["reference"] is true, a fixed computation is timed around each step, and its seconds are printed, too:
the speed of the machine may vary, and the step time in units of this reference time varies less. Everything
that libraries print goes to standard error, so that the parent process does not read it as an answer.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oelm.cores import peak_memory

GEMM_SIZE = 2048  # rows and columns of the matrices whose products show the peak FLOP/s of the machine
REFERENCE_PRODUCTS = 2  # matrix products of the reference computation

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
    """Measures the steps of each turn (consecutive steps of one arm), and answers commands between turns.

    reference: returns the seconds of a fixed computation, called before and after each step; None = no such
        computation
    """

    def __init__(
        self,
        answers: Any,
        memory: Callable[[], dict[str, int]],
        reference: Callable[[], float] | None = None,
    ) -> None:
        self._answers, self._memory, self._reference = answers, memory, reference
        self._left, self._began = 0, 0.0
        self._seconds: list[float] = []
        self._references: list[float] = []

    def answer(self, value: dict[str, Any]) -> None:
        print(json.dumps(value), file=self._answers, flush=True)

    def wait(self) -> bool:
        """Wait for the next command to run steps; return False if standard input was closed instead."""
        for line in sys.stdin:
            command = json.loads(line)
            if "steps" in command:
                self._left, self._seconds = command["steps"], []
                self._references = [self._reference()] if self._reference else []
                return True
            self.answer(self._memory())
        return False

    def step_begins(self) -> None:
        if not self._left and not self.wait():
            os._exit(0)  # another library's loop cannot be stopped from inside a step, so the process exits
        self._began = time.perf_counter()

    def step_ended(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        if self._reference:
            self._references.append(self._reference())
        self._left -= 1
        if not self._left:
            around = [(a + b) / 2 for a, b in itertools.pairwise(self._references)]
            self.answer({"seconds": self._seconds, "reference": around})


def products(number: int, device: str = "cpu") -> Callable[[], None]:
    """Return a function that computes `number` products of square matrices and waits for the device.

    The products are the fastest that this machine has, of torch or our own, whatever the arm uses.
    """
    import torch

    from oelm.compiled.products import product

    a = torch.ones(GEMM_SIZE, GEMM_SIZE, device=device)
    result = torch.empty_like(a)
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)

    def compute() -> None:
        for _ in range(number):
            product(a, a, out=result)
        synchronize()

    return compute


def product_flops(number: int) -> float:
    """Return the FLOPs of `products(number)`."""
    return number * 2.0 * GEMM_SIZE**3


def build_reference() -> Callable[[], float]:
    """Return a function that does the reference computation and returns the seconds that it took."""
    compute = products(REFERENCE_PRODUCTS)
    compute()  # the first time is slower: threads start, and memory is new

    def reference() -> float:
        began = time.perf_counter()
        compute()
        return time.perf_counter() - began

    return reference


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])
    module, _, function = spec["build"].partition(":")
    arm: Arm = getattr(importlib.import_module(module), function)(spec)
    reference = build_reference() if spec.get("reference") else None
    turns = Turns(answers, lambda: {"peak_bytes": peak_memory(), **arm.memory()}, reference)
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
