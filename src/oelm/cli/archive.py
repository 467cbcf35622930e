"""`oelm archive`: pack runs into one file with checksums, or write one small results file per study."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from oelm.cli.options import Json, Runs, Study, require_study, require_writable
from oelm.cli.output import output_file, print, print_json
from oelm.runs.archives import archive as archives
from oelm.runs.archives import keep as keeping
from oelm.runs.archives import merge as merging
from oelm.runs.archives.results_file import SUFFIX, read_results_file
from oelm.runs.scan import require_runs_folder, study_names
from oelm.units import bytes_text, counted

ArchiveFile = Annotated[str, Parameter(help="Archive, FILE.tar.gz.")]
AnyFile = Annotated[str, Parameter(help="Archive, FILE.tar.gz, or results file, STUDY.jsonl.xz.")]


def pack(
    file: ArchiveFile, /, *, study: Study = "", weights: bool = False, runs: Runs = "runs", json: Json = False
) -> None:
    """Pack the configs, manifests, metrics, logs and results of runs into one file.

    Parameters
    ----------
    weights
        Also pack the weights of the best model of each run.
    """
    _check_source(runs, study)
    made = archives.pack(runs, output_file(file), study=study, weights=weights)
    for damage in made.damaged:
        print(f"warning: {damage}; it was packed as it is, and analyze will not count it", file=sys.stderr)
    if json:
        facts = {"file": str(made.path), "runs": made.runs, "files": made.files, "bytes": made.bytes}
        print_json(facts | {"damaged": list(made.damaged)})
    else:
        print(f"{made.path}: {_runs_and_files(made.runs, made.files)}, {bytes_text(made.bytes)}, verified")


def verify(file: AnyFile, /, *, json: Json = False) -> None:
    """Compare every file of an archive or of a results file with its checksum."""
    if file.endswith(SUFFIX):
        stored = read_results_file(Path(file))
        facts: dict[str, Any] = {
            "runs": len(stored),
            "files": [f"{r.place}/{n}" for r in stored for n in r.files],
        }
    else:
        index = archives.verify(file)
        facts = {"runs": len(index.runs), **asdict(index)}
    if json:
        print_json(facts)
    else:
        print(f"{file}: {_runs_and_files(facts['runs'], len(facts['files']))}, all hashes match")


def merge(file: AnyFile, /, *, runs: Runs = "runs", json: Json = False) -> int:
    """Add the runs of an archive or of a results file to the runs folder. Nothing is overwritten.

    Then `oelm decide` and `oelm run` continue the study: they do not train these runs again. A results
    file has no weights.
    """
    require_writable(runs, "--runs / OELM_RUNS")
    done = merging.merge(file, runs)
    if json:
        print_json(asdict(done))
    else:
        for name in done.conflicts:
            print(f"conflict: {Path(runs) / name} differs from the archive; it was not changed")
        print(
            f"{len(done.added)} files added, {len(done.same)} already there, {len(done.conflicts)} conflicts"
        )
        if done.withheld:
            print(
                f"{len(done.withheld)} new files were not added, because their runs have conflicts; "
                "to take a run from the archive, move its folder away and merge again"
            )
    return 1 if done.conflicts else 0


def keep(
    folder: Annotated[str, Parameter(help="Folder to write to.")],
    /,
    *,
    study: Study = "",
    runs: Runs = "runs",
    json: Json = False,
) -> None:
    """Write the results of each study, without weights, to a small file FOLDER/STUDY.jsonl.xz.

    `oelm analyze`, `oelm report` and `oelm board` can read these files with --runs FOLDER.
    """
    _check_source(runs, study)
    require_writable(folder, "FOLDER")
    kept = keeping.keep(runs, folder, study=study)
    if json:
        print_json({"folder": folder, **asdict(kept)})
    else:
        print(f"{folder}: {_runs_and_files(kept.runs, kept.files)}, {bytes_text(kept.bytes)}")


def _check_source(runs: str, study: str) -> None:
    """Raise UsageError if there is no runs folder, or no such study."""
    require_runs_folder(runs)
    require_study(study, study_names(runs))


def _runs_and_files(runs: int, files: int) -> str:
    return f"{counted(runs, 'run')}, {counted(files, 'file')}"
