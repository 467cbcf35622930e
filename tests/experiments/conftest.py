"""A small catalogue of its own and launchers whose training is a stub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "stub"

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
add("DIVERGES-1")
add("FLAKY-1")
add("KILLED-1")
add("UNSOUND-1", "oelm-freeze", baseline="GOOD-1")
add("WORSE-1", "oelm-freeze", baseline="GOOD-1")
add("TUNED-1", tuned=True, grids={"smoke": (1e-3, 3e-3, 9e-3)})
add("TUNED-2", "oelm-freeze", tuned=True, baseline="TUNED-1", grids={"smoke": (1e-3, 3e-3, 5.0)})
"""


@pytest.fixture
def own_catalogue(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CATALOGUE)
    return path


@pytest.fixture
def stub_environment() -> dict[str, str]:
    path = os.pathsep.join([str(STUB), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start_oelm(
    tmp_path: Path, own_catalogue: Path, stub_environment: dict[str, str]
) -> Callable[..., subprocess.Popen[str]]:
    """Start `oelm run ...` with stub training on the test's own catalogue, smoke scale, in tmp_path/runs."""

    def start(*words: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oelm.cli.main", "run", *words, "--scale", "smoke", "--gpus", "none"]
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
