"""Write the results of ended runs to one small file per study, which can be committed to a repository.

`oelm archive keep results` writes these files to the folder `results`. `oelm analyze --runs results` and
`oelm report --runs results` read them like run folders. The files contain no weights, checkpoints or logs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oelm.errors import OelmError
from oelm.files.atomic import json_text
from oelm.files.read import decode, parse_json, read_limited
from oelm.runs.archives.results_file import SUFFIX, read_results_file, write_results_file
from oelm.runs.layout import RESULT_FILES
from oelm.runs.reader import RunReader
from oelm.runs.scan import RunInfo, scan

#: Failed runs are kept too, because an arm (a method in a comparison) looks better without its failed seeds.
KEPT_STATES = ("finished", "diverged", "failed", "oom")
KEPT_FILES = (
    "config.yaml",
    "manifest.json",
    "status.json",
    "metrics.jsonl",
    "freeze_audit.json",
    "timing_stats.json",
    "results.json",
    "predictions.json",
    "test_losses.json",
)
# An absolute path, as a whole text or after a space, quote, "=" or parenthesis; group 1 is its last name.
_ABSOLUTE_PATH = re.compile(r"""(?<![^\s='"(])/(?:[^\s/'"]+/)*([^\s/'"]+)""")
TRIAL_FILES = ("config.yaml", "status.json", "results.json", "timing_stats.json")


@dataclass
class Kept:
    """The number of runs, files and bytes that `keep()` has written."""

    runs: int = 0
    files: int = 0  # results files written, one per study
    bytes: int = 0


def keep(root: Path | str, target: Path | str, *, study: str = "") -> Kept:
    """Write the ended runs below `root` to one file per study, <target>/<study>.jsonl.xz.

    If `study` is given, only the runs of this study are written. If the file of a study exists already,
    the runs in it that are not below `root` stay in the file.
    """
    root, target = Path(root), Path(target)
    if target.resolve().is_relative_to(root.resolve()):
        raise OelmError(
            f"{target} is the runs folder or lies inside it: choose a target folder outside of {root}"
        )
    runs = [run for run in scan(root) if not study or run.study == study]
    for run in runs:
        _refuse_to_leave_out(run)
    ended = [run for run in runs if run.state in KEPT_STATES]
    if not any(run.state == "finished" for run in ended):
        of_study = f" of study {study}" if study else ""
        raise OelmError(f"no finished runs{of_study} in {root}; give a different folder with --runs")
    for run in ended:
        if run.state == "finished" and (damage := run.reader.damage()):
            raise OelmError(
                f"{run.path} is damaged: {'; '.join(damage.values())}. Train it again with the same command."
            )
    target.mkdir(parents=True, exist_ok=True)
    kept = Kept(runs=len(ended))
    for name in dict.fromkeys(run.study for run in ended):
        file = target / f"{name}{SUFFIX}"
        held = {run.place: run.files for run in read_results_file(file)} if file.exists() else {}
        new = dict(_kept_files(run) for run in ended if run.study == name)
        _refuse_lost_results(file, held, new)
        write_results_file(file, held | new)
        kept.files += 1
        kept.bytes += file.stat().st_size
    return kept


def _refuse_to_leave_out(run: RunInfo) -> None:
    """Raise OelmError if a run may have ended but cannot be kept, because comparisons would lack it."""
    if run.seed < 0:
        raise OelmError(
            f"{run.path} is not named seed=<number>; give it its name back, or move it elsewhere."
        )
    trained = run.reader.exists("results.json") or run.reader.exists("metrics.jsonl")
    if run.state in ("broken", "pending") and trained:
        raise OelmError(
            f"{run.path} would be left out, because its status.json is missing or damaged. Start its run "
            "again with the same command, or move the folder elsewhere."
        )


def _refuse_lost_results(
    file: Path, held: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise OelmError if the results of a finished run in `file` would be replaced by others, or by none."""
    for place in held.keys() & new.keys():
        before = held[place].get("results.json")
        if before is not None and before != new[place].get("results.json"):
            raise OelmError(
                f"{file} has other results of {place} than the runs folder, and would lose them. Delete the "
                "file to replace all of its runs, or choose another target folder."
            )


def _kept_files(run: RunInfo) -> tuple[str, dict[str, str]]:
    place = Path(*run.path.parts[-3 if not run.trial else -5 :]).as_posix()
    names = TRIAL_FILES if run.trial else KEPT_FILES
    return place, {name: _shareable(run.reader, name) for name in names if run.reader.exists(name)}


def _shareable(reader: RunReader, name: str) -> str:
    """Return the text of one file of a run, without what describes the machine or the user.

    Host names and the user's note on the data folder are left out. An absolute path is shortened to its last
    name.
    """
    where = str(reader.path / name)
    with reader.open(name) as file:
        text = decode(read_limited(file, where, RESULT_FILES[name]), where)
    if name not in ("manifest.json", "status.json"):
        return text
    try:
        content: Any = parse_json(text, where)
    except OelmError:
        return text  # a damaged file is stored unchanged, so that the analysis reports the damage
    if not isinstance(content, dict):
        return text
    content.pop("host", None)
    if isinstance(machine := content.get("machine"), dict):
        machine.pop("host", None)
    if isinstance(data := content.get("data"), dict):
        data.pop("folder_note", None)
    return json_text(_without_folders(content))


def _without_folders(content: Any) -> Any:
    """Return a copy of parsed JSON in which absolute paths are shortened: "/home/me/data" -> "data"."""
    if isinstance(content, dict):
        return {key: _without_folders(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_folders(value) for value in content]
    return _ABSOLUTE_PATH.sub(r"\1", content) if isinstance(content, str) else content
