"""The cores a process may use (CPU affinity, CPU quota of its cgroup), and the memory that it keeps."""

import math
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from oelm import cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_the_smallest_quota_of_a_version_2_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    write(own, "0::/slurm/job_7/step_0\n")
    write(root / "slurm/job_7/step_0/cpu.max", "max 100000\n")
    write(root / "slurm/job_7/cpu.max", "250000 100000\n")
    assert cores.cgroup_quota(root, own) == 2.5


def test_a_version_1_quota_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    write(own, "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n")
    write(root / "cpu/cpu.cfs_quota_us", "300000\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert cores.cgroup_quota(root, own) == 3
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")  # no quota
    assert cores.cgroup_quota(root, own) == math.inf


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert cores.cgroup_quota(tmp_path / "none", tmp_path / "none") == math.inf


@pytest.mark.parametrize(("quota", "expected"), [(math.inf, 8), (2.5, 3), (0.1, 1), (64, 8)])
def test_affinity_and_quota_both_limit_the_cores(monkeypatch, quota: float, expected: int) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "cgroup_quota", lambda: quota)
    assert cores.usable_cores() == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt()")
def test_freed_memory_is_kept_for_the_next_allocation() -> None:
    script = """
import resource
from oelm.cores import keep_freed_memory

def faults_of(allocations):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(allocations):
        size = 2**26
        block = b"x" * size
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults_of(1)
print(faults_of(3))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # a block of 64 MB has 16,384 pages of 4 KB


_NEW_GARBAGE = """
import gc, sys, weakref
from oelm import cores

class Node:
    def __init__(self):
        self.itself = self  # so that only a garbage collection frees it

if sys.argv[1] == "frozen":
    gc.freeze()
old = weakref.ref(kept := Node())
with cores.only_new_garbage():
    new = weakref.ref(Node())
    del kept
    gc.collect()
    assert old() is not None
    assert new() is None
gc.collect()
print(old() is None, gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(("before", "after"), [("", "True False"), ("frozen", "False True")])
def test_garbage_collection_skips_old_objects_and_unfreezes_only_its_own(before: str, after: str) -> None:
    command = [sys.executable, "-c", _NEW_GARBAGE, before]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == after.split()
