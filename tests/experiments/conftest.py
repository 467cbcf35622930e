"""A small catalogue for launchers, and training that is a stub: in this process or in worker processes."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.experiments import catalogue

STUB = Path(__file__).parent / "stub"
STUB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)

CATALOGUE = """
from oelm.experiments.catalogue import register_experiment
from oelm.experiments.experiment import Experiment
from oelm.config.run_config import BudgetConfig, DataConfig

def add(id, method="baseline", **rest):
    register_experiment(Experiment(
        id=id, study="t", task="lm", data=DataConfig("tinystories"), method=method,
        budget=BudgetConfig(steps=100_000), smoke={"budget.steps": 10}, **rest))

add("GOOD-1")
add("GOOD-2", "oelm-freeze", baseline="GOOD-1")
add("GOOD-3", "oelm-random", baseline="GOOD-1")
add("BROKEN-1")
add("CRASHES-1")
add("DIVERGES-1")
add("FLAKY-1")
add("KILLED-1")
add("UNSOUND-1", "oelm-freeze", baseline="GOOD-1")
add("WORSE-1", "oelm-freeze", baseline="GOOD-1")
for id, method in (("BASE", "baseline"), ("SAME", "oelm-freeze"), ("WORSE", "oelm-freeze"),
                   ("DIVERGES-LATE", "oelm-freeze"), ("CRASHES", "oelm-freeze")):
    register_experiment(Experiment(
        id=f"NOISY-{id}", study="noisy", task="lm", data=DataConfig("stories"), method=method,
        baseline="" if id == "BASE" else "NOISY-BASE", smoke={"budget.steps": 2}))
add("TUNED-1", tuned=True, grids={"smoke": (1e-3, 3e-3, 9e-3)})
add("TUNED-2", "oelm-freeze", tuned=True, baseline="TUNED-1", grids={"smoke": (1e-3, 3e-3, 5.0)})
"""


@pytest.fixture
def own_catalogue(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CATALOGUE, encoding="utf-8")
    return path


@pytest.fixture
def stub_environment() -> dict[str, str]:
    path = os.pathsep.join([str(STUB), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start_oelm(
    tmp_path: Path, own_catalogue: Path, stub_environment: dict[str, str]
) -> Callable[..., subprocess.Popen[str]]:
    """Start `oelm run` or another command with stub training: own catalogue, smoke scale, tmp_path/runs."""

    def start(*words: str, name: str = "run", **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oelm.cli.main", name, *words, "--scale", "smoke", "--gpus", "none"]
        command += ["--catalogue", str(own_catalogue), "--runs", str(tmp_path / "runs")]
        return subprocess.Popen(
            command,
            env={**stub_environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.fixture
def run_oelm(
    in_process: None,
    tmp_path: Path,
    own_catalogue: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Call a command like `start_oelm`, but everything in this process; returns exit code and output."""
    handlers = {number: signal.getsignal(number) for number in STUB_SIGNALS}
    real = sys.modules.get("oelm.training.fit")
    runpy.run_path(str(STUB / "sitecustomize.py"))  # puts the stub into sys.modules
    monkeypatch.setenv("STUB_STEP_SECONDS", "0")
    known = dict(catalogue.experiments())

    def run(*words: str, command: str = "run") -> tuple[int, str]:
        rest = ["--scale", "smoke", "--gpus", "none", "--catalogue", str(own_catalogue)]
        code = main([command, *words, *rest, "--runs", str(tmp_path / "runs")])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    yield run
    catalogue._registered.clear()
    catalogue._registered.update(known)
    catalogue._loaded.clear()
    del sys.modules["oelm.training.fit"]
    if real is not None:
        sys.modules["oelm.training.fit"] = real
    for number, handler in handlers.items():
        signal.signal(number, handler)
