"""One run in this process: take the folder's lock, train, leave a word about how it ended.

`python -m oelm.experiments.launch.worker FOLDER` is what every launcher starts; the folder's config.yaml says
all there is to know. Exit codes are those of `training.folder`, and 77 when another process has the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from oelm.config.mapping import from_mapping
from oelm.config.run_config import Machine
from oelm.errors import OelmError
from oelm.experiments.catalogue import catalogue_files, load_catalogue_files
from oelm.experiments.launch.ranks import exit_rank, follow_parent, run_ranks
from oelm.files.atomic import is_disk_full
from oelm.files.locks import Lock
from oelm.files.read import read_json_lines
from oelm.runs.folder import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, DiskFull, RunFolder, State, Status
from oelm.runs.lock import RunLock

ATTEMPTS = "attempts.jsonl"
CONSOLE = "console.log"
COMMAND = "OELM_COMMAND"  # environment: what a person typed to get this run, for its manifest


def work(path: Path | str, machine: Machine, processes: int = 1) -> int:
    """Bring the run in `path` to its end, or as far as it gets; the exit code says which."""
    folder = RunFolder(path)
    # Under a torchrun of the user's own, rank 0 holds the lock for all of them.
    try:
        with RunLock(folder.path) if is_first() else contextlib.nullcontext() as lock:
            return _work_locked(folder, machine, processes, lock)
    except OSError as error:  # of the lock
        if not is_disk_full(error):
            raise
        raise DiskFull(f"disk full: {folder.path} cannot be locked ({error})") from None


def _work_locked(folder: RunFolder, machine: Machine, processes: int, lock: Lock | None) -> int:
    ended = folder.ended()
    if ended is not None and ended.state == "finished":
        return EXIT_FINISHED
    try:
        if lock is not None and processes > 1:
            code = run_ranks(_rank_command(folder, machine), processes, folder, lock)
        else:
            code = _fit(folder, machine)
    except OelmError as error:
        _note_failure(folder, str(error), error.exit_code)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        _note_failure(folder, f"{type(error).__name__}: {error}", EXIT_FAILED)
        return EXIT_FAILED
    after = None
    with contextlib.suppress(OelmError, OSError):
        after = folder.status()
    note_attempt(folder.path, code, after.reason if after else "")
    return code


def _fit(folder: RunFolder, machine: Machine) -> int:
    from oelm.training.fit import fit

    return int(fit(folder.config(), folder.path, machine).exit_code)


def _rank_command(folder: RunFolder, machine: Machine) -> list[str]:
    """What each process of a run on several GPUs executes."""
    words = [
        "-m",
        "oelm.experiments.launch.worker",
        "--rank",
        str(folder.path),
        "--machine",
        machine_words(machine),
    ]
    return [sys.executable, *words]


def is_first() -> bool:
    """Whether this process writes for its run: it is the only one, or rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def note_attempt(path: Path, code: int, reason: str) -> None:
    """One line per attempt at the run: how it ended and why. Never rewritten."""
    if not is_first():
        return
    record = {
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "exit_code": code,
        "reason": reason,
    }
    with contextlib.suppress(OSError):  # a full disk, or a folder that was moved: status.json says more
        _append(path / ATTEMPTS, json.dumps(record) + "\n")


def _append(path: Path, line: str) -> None:
    """Append a whole line or nothing: a disk that fills up in the middle of it leaves no half line."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        if os.write(file, line.encode()) != len(line):
            os.ftruncate(file, size)
    finally:
        os.close(file)


def attempts(path: Path) -> list[dict[str, Any]]:
    try:
        return list(read_json_lines(path / ATTEMPTS))
    except FileNotFoundError:
        return []


def _note_failure(folder: RunFolder, reason: str, code: int) -> None:
    """status.json and attempts.jsonl for a run whose loop could not write them itself."""
    if not is_first():  # one writer; rank 0 sees its connection close and writes
        return
    status = Status(started=time.time(), pid=os.getpid(), host=socket.gethostname())
    with contextlib.suppress(OelmError, OSError):
        status = folder.status() or status
    state: State = "interrupted" if code == EXIT_INTERRUPTED else "failed"
    if status.state in ("running", "interrupted", "failed"):
        with contextlib.suppress(OSError):
            folder.write_status(replace(status, state=state, reason=reason))
    note_attempt(folder.path, code, reason)


def machine_words(machine: Machine) -> str:
    return json.dumps(asdict(machine))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m oelm.experiments.launch.worker", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--machine", default="{}", help="fields of Machine as JSON")
    parser.add_argument("--processes", type=int, default=1, help="GPUs of one run, a process for each")
    parser.add_argument("--rank", action="store_true", help="one of those processes")
    args = parser.parse_args(argv)
    machine = from_mapping(Machine, json.loads(args.machine), "machine")
    sys.argv = shlex.split(os.environ.get(COMMAND, "")) or sys.argv
    load_catalogue_files(catalogue_files())  # a user's datasets are known where they are registered
    if args.rank:
        follow_parent()
        return _fit(RunFolder(args.folder), machine)
    try:
        code = work(args.folder, machine, args.processes)
    except OelmError as error:
        print(f"oelm: {error}", file=sys.stderr)
        return error.exit_code
    status = RunFolder(args.folder).status()
    if code != EXIT_FINISHED and status is not None:
        print(f"oelm: {status.state}: {status.reason}", file=sys.stderr)  # for console.log
    return code


if __name__ == "__main__":
    if "--rank" in sys.argv:
        exit_rank(main)
    sys.exit(main())
