"""Run a config to its end through many SIGKILLs: `kill_driver.py FOLDER CACHE HOW SEED < config.yaml`.

Each attempt is a forked process that trains for real and is killed for real: HOW = "time" kills it from
outside after a random share of the time that a whole run takes here (so fast machines see kills too), "io" at
a random one of its file operations (before or after a rename, inside a checkpoint's bytes, between best/ and
latest.pt). Forking keeps an attempt cheap: torch is imported once. Prints the number of kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from oelm.training.config import Config, Machine
from oelm.training.fit import fit
from oelm.training.folder import config_from_yaml

MOST_KILLS = 12


def main() -> int:
    folder, cache, how, seed = sys.argv[1:]
    config = config_from_yaml(sys.stdin.read())
    chance = random.Random(int(seed))
    machine = Machine(device="cpu", threads=1, cache_dir=cache, gemm_peak=False)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # its lazy imports, once for all attempts
    whole = seconds_of_a_whole_run(config, folder, machine) if how == "time" else 0.0
    kills = 0
    while True:
        spared = kills >= MOST_KILLS
        child = os.fork()
        if child == 0:
            attempt(config, folder, machine, how if not spared else "", chance.randrange(1, 90))
        if how == "time" and not spared:
            # The first few come early: too early for the run to end before them.
            share = chance.uniform(0.02, 0.25) if kills < 3 else chance.uniform(0.1, 0.7)
            killer = threading.Timer(share * whole, lambda pid=child: kill(pid))
            killer.start()
            _, status = os.waitpid(child, 0)
            killer.cancel()
            killer.join()
        else:
            _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            print(kills)
            return os.WEXITSTATUS(status)
        if os.WTERMSIG(status) != signal.SIGKILL:
            return 99
        kills += 1


def seconds_of_a_whole_run(config: Config, folder: str, machine: Machine) -> float:
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        attempt(config, f"{folder}-timed", machine, "", 0)
    os.waitpid(child, 0)
    return time.monotonic() - begin


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def attempt(config: Config, folder: str, machine: Machine, how: str, at: int) -> None:
    if how == "io":
        die_at_file_operation(at)
    try:
        os._exit(fit(config, folder, machine).exit_code)
    except BaseException:
        traceback.print_exc()
        os._exit(98)


def die_at_file_operation(number: int) -> None:
    """SIGKILL this process just before its n-th rename, link, sync or large write."""
    left = number

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)
            return function(*args, **kwargs)

        return wrapper

    for module, name in ((os, "replace"), (os, "rename"), (os, "link"), (os, "fsync"), (Path, "rename")):
        setattr(module, name, counted(getattr(module, name)))
    from oelm.training import checkpoint

    checkpoint._HashingWriter._emit = counted(checkpoint._HashingWriter._emit)  # inside a checkpoint's bytes


if __name__ == "__main__":
    sys.exit(main())
