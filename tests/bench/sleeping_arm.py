"""A benchmark arm without torch, for tests of the harness: a step counts and takes a given time."""

import time

from oelm.bench.worker import Arm, Turns


def build(spec):
    print("a line that a library prints while it is imported")
    if spec.get("dies"):
        raise SystemExit(3)
    done = []

    def step():
        done.append(None)
        time.sleep(spec["seconds"])

    def own_loop(turns: Turns):
        while True:
            turns.step_begins()
            step()
            turns.step_ended()

    facts = {"name": spec["arm"]}
    return Arm(step, facts, lambda: {"steps": len(done)}, own_loop if spec.get("own_loop") else None)
