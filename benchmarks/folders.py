"""`python -m benchmarks folders`: time `oelm status`, `analyze` and `report` over many finished runs.

One experiment and its baseline are trained at the "smoke" scale (a tiny model, seconds of training). Their
run folders are then copied with other seeds and without checkpoints. The times include the start of Python,
because a user waits for it, too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oelm.bench.harness import Progress
from oelm.config.hash import config_hash
from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError
from oelm.runs.folder import RunFolder
from oelm.runs.layout import VERDICT_FILES, run_path
from oelm.runs.scan import scan

COMMANDS = {"status": ("status",), "analyze": ("analyze",), "report": ("report", "-o", "report.html")}


@dataclass(frozen=True)
class FoldersBench:
    ids: tuple[str, str] = ("GPT-01", "GPT-02")
    counts: tuple[int, ...] = (1, 100, 1000)
    rounds: int = 3


def run(bench: FoldersBench, progress: Progress) -> dict[str, Any]:
    seconds: dict[str, list[list[float]]] = {command: [] for command in COMMANDS}
    with tempfile.TemporaryDirectory() as temporary:
        origin = Path(temporary) / "origin"
        for name in bench.ids:
            progress(f"training {name} at smoke scale")
            call_oelm(origin, "train", name, "--scale", "smoke", "--seed", "0")
        for count in bench.counts:
            runs = Path(temporary) / str(count)
            copy_runs(origin, runs, count)
            for command, words in COMMANDS.items():
                series = []
                for _ in range(bench.rounds):
                    start = time.perf_counter()
                    call_oelm(runs, *words)
                    series.append(time.perf_counter() - start)
                seconds[command].append(series)
            progress(f"{count} folders measured")
    commands = {
        name: {"best_seconds": [min(s) for s in series], "seconds": series}
        for name, series in seconds.items()
    }
    return {"kind": "folders", "settings": asdict(bench), "counts": list(bench.counts), "commands": commands}


def copy_runs(origin: Path, target: Path, count: int) -> None:
    """Copy the trained runs in `origin` to `target`, with new seeds, until `target` has `count` runs."""
    trained = [RunFolder(run.path) for run in scan(origin) if run.state == "finished"]
    for number in range(count):
        source = trained[number % len(trained)]
        config = replace(source.config(), seed=1 + number // len(trained))
        copy = RunFolder(run_path(target, config))
        copy.path.mkdir(parents=True)
        for name in VERDICT_FILES:
            if (source.path / name).exists():
                shutil.copy(source.path / name, copy.path / name)
        shutil.copy(source.path / "status.json", copy.path / "status.json")
        (copy.path / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
        for name, fields in {
            "manifest.json": {"config_hash": config_hash(config)},
            "results.json": {"seed": config.seed},
        }.items():
            content = json.loads((copy.path / name).read_text(encoding="utf-8"))
            (copy.path / name).write_text(json.dumps(content | fields), encoding="utf-8")
        copy.write_checksums()


def call_oelm(runs: Path, *words: str) -> None:
    command = [sys.executable, "-m", "oelm", *words, "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=runs.parent, timeout=3600)
    if done.returncode:
        raise OelmError(
            f"`oelm {' '.join(words)}` failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
