"""The path of a run below the runs folder, and the files that a run consists of.

runs/<study>/<ID>/scale=<s>/seed=<n>/
  config.yaml manifest.json status.json metrics.jsonl training.log freeze_audit.json
  timing_stats.json results.json predictions.json test_losses.json checksums.json best/ latest.pt
  previous.pt lock
"""

from __future__ import annotations

import re
from pathlib import Path

from oelm.config.run_config import RunConfig
from oelm.errors import UsageError
from oelm.files.read import JSON_BYTES, LOG_BYTES, PREDICTIONS_BYTES
from oelm.files.yaml import YAML_BYTES
from oelm.printable import printable

#: The files that verdicts are computed from. checksums.json of a finished run has the hashes of these files.
#: status.json is not one of them: it is written again after checksums.json, and no verdict depends on it
#: (metrics.jsonl, too, says that a run diverged).
VERDICT_FILES = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "freeze_audit.json",
    "timing_stats.json",
    "predictions.json",
    "test_losses.json",
    "results.json",
)

#: {file of a run that an archive contains: largest accepted size in bytes}. Checkpoints, locks, SLURM job
#: numbers and tracker files are left out, because they are only useful on the machine of the run.
RESULT_FILES: dict[str, int] = {
    "config.yaml": YAML_BYTES,
    "manifest.json": JSON_BYTES,
    "status.json": JSON_BYTES,
    "metrics.jsonl": LOG_BYTES,
    "training.log": LOG_BYTES,
    "console.log": LOG_BYTES,
    "attempts.jsonl": LOG_BYTES,
    "freeze_audit.json": JSON_BYTES,
    "timing_stats.json": JSON_BYTES,
    "step_times.bin": LOG_BYTES,
    "step_memory.bin": LOG_BYTES,
    "results.json": JSON_BYTES,
    "predictions.json": PREDICTIONS_BYTES,
    "test_losses.json": PREDICTIONS_BYTES,
    "checksums.json": JSON_BYTES,
}


#: A regular expression for the path of a run relative to the folder of its study.
RUN_PLACE = (
    r"(?P<id>[^/]+)/scale=(?P<scale>[a-z]+)/(?:tune/lr=(?P<trial>[0-9.e+-]+)/)?seed=(?P<seed>[0-9]{1,19})"
)


def match_run_place(pattern: str, path: str) -> re.Match[str] | None:
    """Return the match of `pattern` with a path from an untrusted file; None if there is no match.

    A path that has unprintable characters, hidden folders or more than 1000 characters never matches.
    """
    if printable(path) != path or "\\" in path or len(path) > 1000:
        return None
    if any(part.startswith((".", " ")) for part in path.split("/")):
        return None
    return re.fullmatch(pattern, path)


def run_path(root: Path | str, config: RunConfig) -> Path:
    """Return the folder of a run below the runs folder `root`; a tuning trial is in tune/lr=<lr>/."""
    study, id = _folder_name("study", config.study), _folder_name("id", config.id)
    place = Path(root) / study / id / f"scale={config.scale}"
    if config.tune.trial:
        place = place / "tune" / f"lr={config.optim.lr:g}"
    return place / f"seed={config.seed}"


def _folder_name(field: str, name: str) -> str:
    """Return `name`. Raise UsageError if it is empty, unprintable, starts with a dot or contains a slash."""
    if not name or name.startswith(".") or {"/", "\\"} & set(name) or printable(name) != name:
        raise UsageError(f"{field}: {name!a} cannot be the name of a folder; use letters, digits, - and _")
    return name
