"""`oelm clean`: list the files of ended runs that nothing reads again, and delete them if confirmed."""

from __future__ import annotations

import sys

from oelm.cli.options import Json, Runs, Study, require_study
from oelm.cli.output import print, print_json, print_table
from oelm.errors import UsageError
from oelm.runs.disk import free, freeable
from oelm.runs.scan import require_runs_folder, study_names
from oelm.units import bytes_text


def clean(*, runs: Runs = "runs", study: Study = "", yes: bool = False, json: Json = False) -> None:
    """Print what ended runs still have of checkpoints and models of tuning trials; delete it if confirmed.

    Parameters
    ----------
    yes
        Delete without asking for confirmation.
    """
    require_study(study, study_names(runs))
    require_runs_folder(runs)
    found = freeable(runs)
    items = [item for item in found if not study or item.run.study == study]
    total = sum(item.bytes for item in items)
    if json:
        freed = free(items) if yes else 0
        rows = [
            {"folder": str(i.run.path), "bytes": i.bytes, "files": [f.name for f in i.files]} for i in items
        ]
        print_json({"freeable_bytes": total, "freed_bytes": freed, "runs": rows})
        return
    if not items:
        print("nothing to delete: no ended run has checkpoints or the model of a tuning trial")
        return
    print_table(("ended run", "size"), [(str(i.run.path), bytes_text(i.bytes)) for i in items])
    print(
        f"\n{bytes_text(total)} of checkpoints and models of tuning trials in {len(items)} ended runs; "
        "the best models of runs and all results are not deleted"
    )
    if yes or _confirmed():
        print(f"deleted {bytes_text(free(items))}")
    else:
        print("nothing was deleted")


def _confirmed() -> bool:
    """Ask on the terminal whether to delete the checkpoints, and return the answer.

    Without a terminal this raises UsageError, because piped input is not meant as an answer to this question.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "nothing was deleted: cannot ask for confirmation without a terminal; add --yes to delete the "
            "checkpoints"
        )
    return input("delete these checkpoints? [y/N] ").strip().lower() in ("y", "yes")
