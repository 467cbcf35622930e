"""One benchmark arm in a process of its own: `python -m oelm.bench.worker '{"arm": ...}'`.

Told "step", it does one whole step and answers with its seconds; told "memory", with its peak. It
answers on the original standard output, so that nothing a library prints can be taken for an answer.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

# As `oelm train` does: large pages for large tensors, which on Linux saves most page faults.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(sys.argv[1])

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    from oelm.bench.arms import build

    arm = build(spec)
    answer(arm.facts)
    if arm.drives is not None:  # the arm has a loop of its own (the Hugging Face Trainer)
        arm.drives(lambda: _wait(answer, arm.memory), answer)
        return
    while _wait(answer, arm.memory):
        start = time.perf_counter()
        arm.step()
        answer({"seconds": time.perf_counter() - start})


def _wait(answer: Callable[[dict[str, Any]], None], memory: Callable[[], dict[str, int]]) -> bool:
    """Sleep until told to step (True) or until there is nothing more to do (False)."""
    for line in sys.stdin:
        if line.strip() == "step":
            return True
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer({"peak_bytes": peak, **memory()})
    return False


if __name__ == "__main__":
    main()
