"""The cores a process may use: CPU affinity, and the CPU quota of its cgroup."""

import math
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
