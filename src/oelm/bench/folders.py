"""`oelm bench folders`: how long `oelm status` and `oelm analyze` take over 1, 100 and 1000 finished runs.

One experiment and its baseline are really trained at smoke scale; their folders are then copied under other
seeds, without checkpoints. Whole commands are timed, start of the interpreter included: what a person waits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oelm.bench.growth import exponent
from oelm.bench.results import load, record
from oelm.config.hash import config_hash
from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_json
from oelm.runs.folder import RunFolder, run_path

COMMANDS = ("status", "analyze")


@dataclass(frozen=True)
class FoldersBench:
    ids: tuple[str, str] = ("GPT-01", "GPT-02")
    counts: tuple[int, ...] = (1, 100, 1000)
    rounds: int = 3

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise UsageError("counts of folders begin at 1")


def run(bench: FoldersBench, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    before = load()
    seconds: dict[str, list[list[float]]] = {command: [] for command in COMMANDS}
    with tempfile.TemporaryDirectory() as temporary:
        origin = Path(temporary) / "origin"
        for number in bench.ids:
            progress(f"training {number} at smoke scale")
            _oelm("train", number, "--scale", "smoke", "--seed", "0", "--runs", str(origin))
        for count in bench.counts:
            place = Path(temporary) / str(count)
            clone(origin, place, count)
            for command in COMMANDS:
                series = []
                for _ in range(bench.rounds):
                    start = time.perf_counter()
                    _oelm(command, "--runs", str(place))
                    series.append(time.perf_counter() - start)
                seconds[command].append(series)
            progress(f"{count} folders measured")
    return record(
        "folders",
        before,
        settings=asdict(bench),
        counts=list(bench.counts),
        commands=summarise(bench, seconds),
    )


def summarise(bench: FoldersBench, seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
    found = {}
    for command, series in seconds.items():
        best = [min(values) for values in series]
        found[command] = {"best_seconds": best, "seconds": series}
        more = [(n, s - best[0]) for n, s in zip(bench.counts, best, strict=True) if s > best[0]]
        if len(more) > 1:  # beyond the start of the interpreter
            found[command]["exponent"] = exponent(*zip(*more, strict=True))
    return found


def clone(origin: Path, place: Path, count: int) -> None:
    """`count` run folders like those of `origin`, in turn, under other seeds; small files only."""
    sources = [RunFolder(path.parent) for path in sorted(origin.rglob("results.json"))]
    if not sources:
        raise OelmError(f"no finished run in {origin}")
    for number in range(count):
        source = sources[number % len(sources)]
        config = replace(source.config(), seed=number // len(sources))
        target = RunFolder(run_path(place, config))
        target.path.mkdir(parents=True)
        for path in source.path.iterdir():
            if path.is_file() and path.suffix != ".pt":
                shutil.copy(path, target.path / path.name)
        target.config_file.write_text(config_to_yaml(config), encoding="utf-8")
        _change(target.results_file, seed=config.seed)
        _change(target.manifest_file, config_hash=config_hash(config))


def _change(path: Path, **fields: Any) -> None:
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **fields})


def _oelm(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oelm.cli.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OelmError(
            f"`oelm {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()[-500:]}"
        )
