"""One benchmark arm in a process of its own: `python -m oelm.bench.worker '{"arm": ...}'`.

Told "step", it does one whole step and answers with its seconds; told "memory", with its peak. It
answers on the original standard output, so that nothing a library prints can be taken for an answer.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    from oelm.bench.arms import build
    from oelm.bench.turns import Clock

    start = {
        "start_bytes": psutil.Process().memory_info().rss
    }  # the interpreter and its libraries, before the network

    def memory() -> dict[str, int]:
        return {"peak_bytes": _peak(), **start, **arm.memory()}

    arm = build(spec)
    answer(arm.facts)
    if arm.drives is not None:  # the arm has a loop of its own (the Hugging Face Trainer)
        arm.drives(lambda: _wait(answer, memory), answer)
        return
    while _wait(answer, memory):
        clock = Clock()
        arm.step()
        answer(clock.read())


def _wait(answer: Callable[[dict[str, Any]], None], memory: Callable[[], dict[str, int]]) -> bool:
    """Sleep until told to step (True) or until there is nothing more to do (False)."""
    for line in sys.stdin:
        if line.strip() == "step":
            return True
        answer(memory())
    return False


def _peak() -> int:
    """Bytes of memory at most so far. Linux' own count: the general one begins with the parent's."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        kilobytes = int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])  # type: ignore[index]
    return kilobytes * 1024


if __name__ == "__main__":
    main()
