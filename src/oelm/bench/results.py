"""Benchmark results as files: what was measured, where, with which versions, by which command."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from oelm.files.atomic import write_json
from oelm.training.logs.manifest import machine_facts, versions

RESULTS = Path("benchmarks/results")


def load() -> list[float]:
    """How busy the machine is: processes that wanted a core, mean of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def record(kind: str, load_before: list[float], **measured: Any) -> dict[str, Any]:
    """A result with all that is needed to read or repeat it."""
    machine = machine_facts()
    del machine["host"]  # a name says nothing about speed
    return {
        "kind": kind,
        "command": shlex.join(["oelm", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": versions(),
        "load": {"before": load_before, "after": load()},
        **measured,
    }


def save(result: dict[str, Any], path: Path | str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return path
