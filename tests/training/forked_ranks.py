"""Runs on two real ranks that are forked from the test process, so that no rank has to import torch again."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable


def run_ranks(work: Callable[[int], int], size: int = 2, seconds: int = 300) -> list[int]:
    """Call `work(rank)` in forked processes with the environment of torchrun; return their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    sys.stderr.flush()
    children = [_fork(work, rank, size, port, seconds) for rank in range(size)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(work: Callable[[int], int], rank: int, size: int, port: int, seconds: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(seconds)  # a deadlock ends this process instead of blocking the tests
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = work(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without pytest's cleanup
