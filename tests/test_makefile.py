"""`make` finds a Python by itself: the first of 3.11, 3.12, 3.13 and python3 that really runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"
SOURCES = [f"src/oelm/compiled/{name}" for name in ("kernels.cpp", "products.cpp", "shared.h")]
RUNS = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
SHIM_OF_NOTHING = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
TOO_OLD = "#!/bin/sh\nexit 1\n"  # what the version check answers

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, pythons: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make -n install` in an empty project where only `pythons` are on the PATH."""
    (folder / "Makefile").write_bytes(MAKEFILE.read_bytes())
    for name in ("pyproject.toml", "constraints.txt", *SOURCES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    programs = folder / "programs"
    programs.mkdir()
    for name, text in pythons.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    return subprocess.run(
        [str(shutil.which("make")), "-n", "install", *arguments],
        cwd=folder,
        env={"PATH": str(programs), "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3.11": RUNS, "python3.12": RUNS}, "python3.11"),
        ({"python3.12": RUNS, "python3": RUNS}, "python3.12"),
        ({"python3.11": SHIM_OF_NOTHING, "python3.12": SHIM_OF_NOTHING, "python3.13": RUNS}, "python3.13"),
        ({"python3.11": SHIM_OF_NOTHING, "python3": RUNS}, "python3"),
    ],
)
def test_the_first_python_that_runs_is_taken(tmp_path, pythons, chosen):
    done = make(tmp_path, pythons)
    assert done.returncode == 0, done.stderr
    assert f"{chosen} -m venv .venv" in done.stdout.splitlines()


def test_python_may_be_named(tmp_path):
    assert "/opt/mine -m venv .venv" in make(tmp_path, {"python3.11": RUNS}, "PYTHON=/opt/mine").stdout


@pytest.mark.parametrize("pythons", [{}, {"python3.11": SHIM_OF_NOTHING, "python3": TOO_OLD}])
def test_no_usable_python_is_a_clear_error(tmp_path, pythons):
    done = make(tmp_path, pythons)
    assert done.returncode != 0
    assert "No Python 3.11 or newer" in done.stderr
    assert "make PYTHON=/path/to/python3" in done.stderr
