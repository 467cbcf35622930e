"""The wheel holds everything that the package needs outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of a wheel that is built from a copy of the sources, without a network."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or newer builds the wheel")
    copy, dist, target = (tmp_path_factory.mktemp(name) for name in ("copy", "dist", "wheel"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "src" / "oelm", copy / "src" / "oelm", ignore=shutil.ignore_patterns("__pycache__")
    )
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(dist)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(copy)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed")
    assert done.returncode == 0, done.stderr
    (wheel,) = dist.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def oelm(unpacked: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "oelm", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(unpacked), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(unpacked: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = {p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        return {str(path.relative_to(folder)) for path in found}

    assert files(unpacked / "oelm") == files(ROOT / "src" / "oelm")


@pytest.mark.slow
def test_commands_run_from_the_wheel_outside_the_repository(unpacked: Path, tmp_path: Path) -> None:
    done = oelm(unpacked, tmp_path, "demo", "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    done = oelm(unpacked, tmp_path, "init", "my.yaml")  # copies a file of the package
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my.yaml").is_file()
