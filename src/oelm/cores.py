"""The CPU cores that this process may use, the memory that it has used, and how it keeps and frees memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

# Parameters of mallopt() in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Environment of a process that trains. An OpenMP thread without work waits about 0.1 ms in a busy loop for
# the next operation of torch, and then sleeps: by default it would take about 15 ms of CPU time from other
# processes, and a thread that sleeps at once starts too late.
OPENMP_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use.

    It is the number of cores in the CPU affinity of the process, or the CPU quota of its cgroup if that is
    smaller. A container or a SLURM job often gets fewer cores than the machine has.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, cgroup_quota())))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the smallest CPU quota, in cores, of this process's cgroup (v1 or v2) and its parent cgroups.

    The result is infinity if no quota is set. `root` is the folder of the cgroup file system, and `own` is
    the file that lists the cgroups of this process.
    """
    folders = {root, root / "cpu"}
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:  # a line is "0::/path" in cgroup version 2, "4:cpu,cpuacct:/path" in version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            base = root if controllers == "" else root / "cpu"
            group = base / path.lstrip("/")
            folders.update([group, *(parent for parent in group.parents if parent.is_relative_to(base))])
    return min(_quota(folder) for folder in folders)


def _quota(folder: Path) -> float:
    """Return the CPU quota, in cores, that one cgroup folder sets, or infinity if it sets none."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        cores = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # no quota is set: the file is missing or says "max"
        return math.inf
    return cores if cores > 0 else math.inf


def peak_memory() -> int:
    """Return the peak memory of this process in bytes.

    On Linux the value is VmHWM of /proc/self/status, because the peak that getrusage() reports includes the
    peak of the parent process.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def keep_freed_memory() -> None:
    """Make the C library keep the memory that this process frees, for its next allocations.

    By default, glibc returns large freed blocks to the operating system, and every training step allocates
    them again: the operating system has to zero each page anew. Other C libraries are left unchanged.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return
    mallopt(_M_MMAP_THRESHOLD, 2**30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within this context, garbage collection skips all objects that exist at its start.

    The objects of a training step cause garbage collections, and each would also visit the several hundred
    thousand objects of the imported modules. With a small model, that takes a notable part of a step.

    If the caller has frozen objects, nothing is unfrozen at the end: `gc.unfreeze()` unfreezes all objects.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
