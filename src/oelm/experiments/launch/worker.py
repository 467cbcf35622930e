"""The worker process of one run: it locks the run folder, trains, and records how the attempt ended.

Every launcher starts `python -m oelm.experiments.launch.worker FOLDER`; FOLDER/config.yaml has the settings
of the run. The exit codes are those of `oelm.runs.states`, and 77 if another process works on the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

from oelm.config.mapping import from_mapping
from oelm.config.run_config import Machine
from oelm.errors import OelmError
from oelm.experiments.catalogue import load_catalogue_files
from oelm.experiments.launch.attempts import Attempt, append_attempt
from oelm.experiments.launch.ranks import ONE_NODE, Nodes, exit_rank, follow_parent, run_ranks
from oelm.files.atomic import is_disk_full
from oelm.files.locks import Lock
from oelm.runs.folder import DiskFull, RunFolder
from oelm.runs.lock import RunLock
from oelm.runs.schema import Status
from oelm.runs.states import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, State, exit_code_of

CONSOLE = "console.log"


WORKER = (sys.executable, "-m", "oelm.experiments.launch.worker")


def worker_command(folder: Path | str, machine: Machine, *options: str) -> list[str]:
    """Return the command that starts a worker process for the run in `folder`."""
    return [*WORKER, *worker_arguments(folder, machine, *options)]


def worker_arguments(folder: Path | str, machine: Machine, *options: str) -> list[str]:
    return [str(folder), "--machine", machine_to_json(machine), *options]


def train_folder(
    path: Path | str,
    machine: Machine,
    processes: int = 1,
    nodes: Nodes = ONE_NODE,
    *,
    keep_checkpoints: bool = False,
) -> int:
    """Train the run in the folder `path` until it ends or is interrupted; return the exit code of the worker.

    processes: number of ranks on this node
    nodes: the nodes of the run; on nodes other than the first, the worker only starts ranks, without a lock
    keep_checkpoints: keep the files that nothing reads after the run has ended
    """
    folder = RunFolder(path)
    if not nodes.is_first:
        ranks = worker_command(folder.path, machine, "--rank")
        return EXIT_FINISHED if folder.ended() else run_ranks(ranks, processes, folder, None, nodes)
    try:
        # If the user started this process with torchrun, rank 0 holds the lock for all ranks.
        with RunLock(folder.path) if is_rank_zero() else contextlib.nullcontext() as lock:
            code = _train_locked(folder, machine, processes, lock, nodes)
            if lock is not None and not keep_checkpoints:
                with contextlib.suppress(OelmError, OSError):
                    folder.drop_unneeded_files()
            return code
    except OSError as error:  # RunLock could not write its file
        if not is_disk_full(error):
            raise
        raise DiskFull(
            f"disk full: {folder.path} cannot be locked ({error}); "
            "free disk space, then run the same command again"
        ) from None


def _train_locked(
    folder: RunFolder, machine: Machine, processes: int, lock: Lock | None, nodes: Nodes
) -> int:
    """Train the run, record how it ended, and return the exit code.

    lock: the lock of the run, held by the caller; None if rank 0 of torchrun holds it
    """
    ended = folder.ended()
    if ended is not None and ended.state == "finished":
        return EXIT_FINISHED
    try:
        if lock is not None and processes * nodes.count > 1:
            code = run_ranks(worker_command(folder.path, machine, "--rank"), processes, folder, lock, nodes)
        else:
            code = _fit(folder, machine)
    except OelmError as error:
        code = exit_code_of(error)
        _record_failure(folder, str(error), code)
        return code
    except Exception as error:
        traceback.print_exc()
        _record_failure(folder, f"{type(error).__name__}: {error}", EXIT_FAILED)
        return EXIT_FAILED
    status = None
    with contextlib.suppress(OelmError, OSError):
        status = folder.status()
    if is_rank_zero():
        append_attempt(folder.path, Attempt(code, status.reason if status else ""))
    return code


def _fit(folder: RunFolder, machine: Machine) -> int:
    from oelm.training.fit import fit_claimed

    return int(fit_claimed(folder.config(), folder.path, machine).exit_code)


def is_rank_zero() -> bool:
    """Return whether this process is rank 0 or the only process of the run; only rank 0 writes run files."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) <= 1
    return alone or int(os.environ.get("RANK", "0")) == 0


def _record_failure(folder: RunFolder, reason: str, code: int) -> None:
    """Write to status.json and attempts.jsonl that the run failed outside the training loop."""
    # Only rank 0 writes these files. It fails, too, because the end of this rank closes their connection.
    if not is_rank_zero():
        return
    status = Status(started=time.time(), pid=os.getpid(), host=socket.gethostname())
    with contextlib.suppress(OelmError, OSError):
        status = folder.status() or status
    state: State = "interrupted" if code == EXIT_INTERRUPTED else "failed"
    if status.state in ("running", "interrupted", "failed"):
        with contextlib.suppress(OSError):
            folder.write_status(replace(status, state=state, reason=reason))
    append_attempt(folder.path, Attempt(code, reason))


def machine_to_json(machine: Machine) -> str:
    return json.dumps(asdict(machine))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m oelm.experiments.launch.worker", description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--machine", default="{}", help="fields of oelm.config.run_config.Machine as JSON")
    parser.add_argument("--processes", type=int, default=1, help="number of processes, one for each GPU")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes, each with its own worker")
    parser.add_argument("--node", type=int, default=0, help="number of this node; node 0 has rank 0")
    parser.add_argument("--meet", default="", help="HOST:PORT of node 0, to which all ranks connect")
    parser.add_argument("--rank", action="store_true", help="this process is one rank of the run")
    parser.add_argument("--keep-checkpoints", action="store_true", help="also after the run has finished")
    args = parser.parse_args(argv)
    machine = from_mapping(Machine, json.loads(args.machine), "machine")
    load_catalogue_files(machine.catalogue_files)  # they may register the dataset of the run
    if args.rank:
        follow_parent()
        return _fit(RunFolder(args.folder), machine)
    try:
        nodes = Nodes(args.nodes, args.node, args.meet)
        keep = args.keep_checkpoints
        code = train_folder(args.folder, machine, args.processes, nodes, keep_checkpoints=keep)
    except OelmError as error:
        print(f"oelm: {error}", file=sys.stderr)
        return error.exit_code
    status = RunFolder(args.folder).status()
    if code != EXIT_FINISHED and status is not None:
        print(f"oelm: {status.state}: {status.reason}", file=sys.stderr)
    return code


if __name__ == "__main__":
    if "--rank" in sys.argv:
        exit_rank(main)
    sys.exit(main())
