"""`oelm clean`: list the resume checkpoints of finished runs, delete them on confirmation."""

from __future__ import annotations

import sys
from pathlib import Path

from oelm.cli.options import Json, Runs, Study, require_study
from oelm.cli.output import print, print_json, print_table
from oelm.runs.disk import free, freeable
from oelm.units import bytes_text


def clean(*, runs: Runs = "runs", study: Study = "", yes: bool = False, json: Json = False) -> None:
    """List the resume checkpoints of finished runs and delete them after a yes.

    Parameters
    ----------
    yes
        Delete without asking.
    """
    found = freeable(runs)
    require_study(study, (item.run.study for item in found))
    items = [item for item in found if not study or item.run.study == study]
    total = sum(item.bytes for item in items)
    if json:
        freed = free(items) if yes else 0
        rows = [
            {"folder": str(i.run.path), "bytes": i.bytes, "files": [f.name for f in i.files]} for i in items
        ]
        print_json({"freeable_bytes": total, "freed_bytes": freed, "runs": rows})
        return
    if not items and Path(runs).is_dir():
        print("nothing to free: no finished run has resume checkpoints")
        return
    if not items:
        print(f"nothing to free: there is no folder {runs} (--runs)")
        return
    print_table(("finished run", "size"), [(str(i.run.path), bytes_text(i.bytes)) for i in items])
    print(f"\n{bytes_text(total)} in {len(items)} finished runs; best models and results stay")
    if yes or _confirmed():
        print(f"freed {bytes_text(free(items))}")
    else:
        print("nothing was removed")


def _confirmed() -> bool:
    """Ask on a terminal. Without one the answer is no: piped input is not meant for this question."""
    if not sys.stdin.isatty():
        print("there is no terminal to ask on: --yes frees it")
        return False
    return input("free it? [y/N] ").strip().lower() in ("y", "yes")
