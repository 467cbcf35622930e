"""The wheel in a virtual environment of its own, outside the repository: its files, and `oelm demo`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from oelm.experiments.catalogue import select

ROOT = Path(__file__).parents[1]


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, without variables that point to the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = list(map(str, words))
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1000, check=False
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a new environment with the wheel; nothing is downloaded.

    The libraries that oelm needs are those of the environment of the tests. `make wheel` installs them anew.
    """
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or newer builds the wheel")
    copy, dist, environment = (tmp_path_factory.mktemp(name) for name in ("copy", "dist", "env"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "src" / "oelm", copy / "src" / "oelm", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip, offline = (sys.executable, "-m", "pip"), ("--quiet", "--no-deps", "--no-index")
    done = run(dist, *pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", dist, copy)
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed")
    assert done.returncode == 0, done.stderr
    (wheel,) = dist.glob("*.whl")
    venv.create(environment, with_pip=False)
    bin_folder = environment / ("Scripts" if os.name == "nt" else "bin")
    done = run(dist, *pip, "--python", bin_folder / "python", "install", *offline, wheel)
    assert done.returncode == 0, done.stderr
    # A .pth file makes the libraries visible, but not an editable install of oelm beside them.
    (site,) = environment.glob("[Ll]ib/**/site-packages")
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    return bin_folder


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(programs: Path, tmp_path: Path) -> None:
    def files(folder: Path) -> set[str]:
        # The source folder holds compiled code only after `pip install -e`, perhaps for several Pythons.
        found = {p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        return {str(path.relative_to(folder)) for path in found if path.suffix != ".so"}

    done = run(tmp_path, programs / "python", "-c", "import oelm; print(oelm.__file__)")
    package = Path(done.stdout.strip()).parent
    assert package.is_relative_to(programs.parent), done
    assert files(package) == files(ROOT / "src" / "oelm")


@pytest.mark.slow
def test_the_demo_of_the_wheel_writes_a_report_and_does_not_repeat_finished_runs(
    programs: Path, tmp_path: Path
) -> None:
    """Real runs at smoke scale with one seed."""
    command = (programs / "oelm", "demo", "--scale", "smoke", "--seeds", "0", "--cache-dir", "cache")
    done = run(tmp_path, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    total = len(select(study="demo"))
    assert f"{total}/{total}" in done.stdout
    assert "n = 1" in done.stdout
    assert done.stdout.splitlines()[-1] == str(Path("demo") / "report.html")
    assert "oelm-bias" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")

    def results() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("results.json")}

    before = results()
    assert len(before) == total
    assert run(tmp_path, *command).returncode == 0
    assert results() == before


@pytest.mark.slow
def test_init_of_the_wheel_writes_a_study_file(programs: Path, tmp_path: Path) -> None:
    done = run(tmp_path, programs / "oelm", "init", "my.yaml")  # copies a file of the package
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my.yaml").is_file()
