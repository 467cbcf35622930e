"""Inject a sample of the faults of tests/torture; `make torture` tries many more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the counts of one process that tries all kinds of faults.

    One process for all kinds is fast: it imports torch once and forks for every case.
    """
    written = tmp_path_factory.mktemp("torture") / "figures.json"
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--short", "--json", str(written)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert written.exists(), done.stdout + done.stderr
    return dict(json.loads(written.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.timeout(3300)  # the first test waits for all cases, which take a minute on an idle core
@pytest.mark.parametrize(
    ("kind", "least"),
    list(
        {"kills": 8, "disk": 8, "signals": 5, "flips": 20, "hostile": 10, "archives": 12, "doctor": 4}.items()
    ),
)
def test_no_fault_of_this_kind_goes_wrong(figures: dict[str, Any], kind: str, least: int) -> None:
    wrong = [f"{entry['case']}: {entry['why']}" for entry in figures["wrong"] if entry["kind"] == kind]
    assert not wrong, "\n".join(wrong)
    assert figures["tried"][kind] >= least
