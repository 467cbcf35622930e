"""Start and watch the processes ("ranks") of one run on this machine, which may be one of several nodes.

torchrun is not used: its store listens on every network interface, its exit code is 1 for every kind of
failure, and its ranks can outlive it and continue to write (docs/decisions/0001-own-ranks.md). The ranks that
this module starts

- find each other through a file in a private folder and communicate only over the loopback interface (ranks
  on several nodes instead connect to a port of the first node, which is open to the network),
- end when the worker that started them ends, even if that worker is killed,
- share the run's lock with the worker, so no second worker can start while a rank is alive.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from oelm.errors import OelmError
from oelm.experiments.launch.signals import die_with_parent, handle_signals, killed_by
from oelm.files.locks import Lock, keep_inherited_lock
from oelm.files.read import read_json_object
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Status
from oelm.runs.states import EXIT_CODES, EXIT_FAILED, State
from oelm.training.signals import RANK_DIR, signals_to_handle

# When one rank has ended, the other ranks get this much time to notice it and exit.
_GRACE_SECONDS = 30.0
# When the run has ended, its ranks get this much time to exit, because experiment trackers may still upload.
_FINAL_STATE_SECONDS = 300.0
_POLL_SECONDS = 0.1
_STATUS_SECONDS = 1.0

# Environment variables with the numbers of the file descriptors that a rank inherits from its worker.
_PARENT_PIPE = "OELM_PARENT_PIPE"
_LOCK_FILE = "OELM_LOCK_FILE"


@dataclass(frozen=True)
class Nodes:
    """The number of nodes of a run, and the index of this node. Every node has a worker that starts ranks."""

    count: int = 1
    index: int = 0  # 0 is the node of rank 0; its worker holds the lock and writes the run folder
    address: str = ""  # HOST:PORT of node 0 to which all ranks connect; "" for a run on one node

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def flags(self) -> list[str]:
        """Return the command-line flags that pass these values to a worker."""
        if self.count == 1:
            return []
        return ["--nodes", str(self.count), "--node", str(self.index), "--meet", self.address]

    def environment(self) -> dict[str, str]:
        """Return the environment of this process, with MASTER_ADDR and MASTER_PORT as torchrun sets them.

        For a run on one node, both variables are left out.
        """
        names = ("MASTER_ADDR", "MASTER_PORT")
        own = {name: value for name, value in os.environ.items() if name not in names}
        host, _, port = self.address.rpartition(":")
        return own | (dict(zip(names, (host, port), strict=True)) if self.address else {})


ONE_NODE = Nodes()


def run_ranks(
    command: list[str], count: int, folder: RunFolder, lock: Lock | None, nodes: Nodes = ONE_NODE
) -> int:
    """Start `count` ranks with `command`, wait until all have ended, and return the exit code of the run.

    lock: the lock of the run; None on nodes other than the first, whose worker holds the lock for all
    """
    return _Ranks(command, count, folder, lock, nodes).run()


@dataclass
class _Ranks:
    command: list[str]
    count: int
    folder: RunFolder
    lock: Lock | None
    nodes: Nodes
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    asked_to_stop: str = ""  # name of the signal that asked this worker to stop; "" = none
    killed: set[int] = field(default_factory=set)  # ranks that this worker itself killed

    def run(self) -> int:
        before = self.folder.status()
        self.attempt = before.attempt if before else 0
        # Nothing is ever written to this pipe. Only this process has its writing end open. So when this
        # process ends, the ranks read end-of-file from the pipe and know that they must end, too.
        reader, writer = os.pipe()
        with tempfile.TemporaryDirectory(prefix="oelm-ranks-", ignore_cleanup_errors=True) as private:
            self.private = Path(private)
            try:
                with handle_signals(signals_to_handle(), self._stop):
                    for rank in range(self.count):
                        self._start(rank, reader)
                    self._wait()
            finally:
                self._kill_living()
                os.close(reader)
                os.close(writer)
            return self._conclude()

    def _start(self, rank: int, pipe: int) -> None:
        lock = self.lock.file if self.lock else None
        inherited = [pipe, *([lock] if lock is not None else [])]
        environment = {
            **self.nodes.environment(),
            "RANK": str(self.nodes.index * self.count + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.nodes.count * self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            RANK_DIR: str(self.private),
            _PARENT_PIPE: str(pipe),
            _LOCK_FILE: "" if lock is None else str(lock),
        }
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which asks the ranks to stop
        )
        self.processes.append(process)
        if self.asked_to_stop:  # `_stop()` ran before this rank was in `processes`, so it got no signal yet
            process.send_signal(signal.SIGTERM)

    def _stop(self, number: int, frame: object) -> None:
        self.asked_to_stop = signal.Signals(number).name
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)

    def _wait(self) -> None:
        """Wait until every rank has ended; kill ranks that do not exit in time after the run has ended."""
        deadline, look_at_status = math.inf, 0.0
        while self._living():
            now = time.monotonic()
            if self._one_has_ended():
                deadline = min(deadline, now + _GRACE_SECONDS)
            elif now >= look_at_status:
                look_at_status = now + _STATUS_SECONDS
                if self._final_status() is not None:
                    deadline = min(deadline, now + _FINAL_STATE_SECONDS)
            if now > deadline or self._stopped_before_training():
                self._kill_living()
            time.sleep(_POLL_SECONDS)

    def _living(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def _one_has_ended(self) -> bool:
        """Return whether a rank has exited or reported a failure (it may hang after its report)."""
        return len(self._living()) < self.count or bool(self._reports())

    def _stopped_before_training(self) -> bool:
        """Return whether SIGTERM killed a rank before it could handle the signal.

        If so, the other ranks must be killed, because they would wait for this rank forever.
        """
        codes = [process.returncode for process in self.processes]
        return bool(self.asked_to_stop) and -signal.SIGTERM in codes

    def _kill_living(self) -> None:
        for rank in self._living():
            self.killed.add(rank)
            self.processes[rank].kill()
            self.processes[rank].wait()

    def _reports(self) -> list[dict[str, Any]]:
        """Return the failure reports of the ranks other than rank 0, earliest first."""
        found = [read_json_object(path) for path in self.private.glob("rank-*.json")]
        return sorted(found, key=lambda report: report["time"])

    def _final_status(self) -> Status | None:
        """Return the status of the run if the ranks have written how it ended; None otherwise."""
        with contextlib.suppress(OelmError):
            status = self.folder.status()
            if status is not None and status.attempt > self.attempt and status.state != "running":
                return status
        return None

    def _conclude(self) -> int:
        """Return the exit code of the run, which is that of rank 0 unless another rank failed first.

        If rank 0 could not write the reason of a failure to status.json, this method writes it.
        """
        status, code = self._final_status(), self.processes[0].returncode
        if not self.nodes.is_first:  # only the worker of the first node writes status.json
            failed = EXIT_FAILED if any(process.returncode for process in self.processes) else 0
            return next((p.returncode for p in self.processes if p.returncode > 0), failed)
        cause = self._cause(status)
        if cause is None:
            if 0 not in self.killed and code >= 0:
                return code
            if status is not None:
                return EXIT_CODES[status.state]
            cause = self._without_final_status(code)
        state, reason = cause
        held = self.folder.status() or Status(started=time.time())
        self.folder.write_status(replace(held, state=state, reason=reason))
        return EXIT_CODES[state]

    def _cause(self, status: Status | None) -> tuple[State, str] | None:
        """Return (state, reason) of the run if a rank was killed or a rank other than 0 failed first.

        In these cases rank 0 knows only that its connections were closed. In other cases, return None.

        status: the final status that rank 0 wrote, or None
        """
        if status is not None and status.state != "failed":
            return None
        for rank, process in enumerate(self.processes):
            code = process.returncode
            if rank == 0 and status is not None:  # rank 0 was killed after it wrote the final status
                continue
            if code < 0 and rank not in self.killed and not self._stopped_before_training():
                return "failed", f"rank {rank} was {killed_by(code)}"
        for report in self._reports():
            if status is None or report["time"] < status.heartbeat:
                return report["state"], f"rank {report['rank']}: {report['reason']}"
        return None

    def _without_final_status(self, code: int) -> tuple[State, str]:
        """Return (state, reason) of a run whose rank 0 was killed before it wrote them to status.json."""
        if self.asked_to_stop:
            return (
                "interrupted",
                f"stopped by {self.asked_to_stop} before training; run the same command again to continue",
            )
        for rank, process in enumerate(self.processes[1:], 1):
            if process.returncode > 0 and rank not in self.killed:
                reason = f"rank {rank} ended with exit code {process.returncode}"
                return "failed", f"{reason}; see console.log or slurm.err"
        return "failed", f"rank 0 was {killed_by(code)}"


def follow_parent() -> None:
    """Keep the run's lock, which this rank inherits from its worker, and end this rank when the worker ends.

    Every rank calls this when it starts. In a process that is not a rank it does nothing.
    """
    if _PARENT_PIPE not in os.environ:
        return
    pipe, lock = int(os.environ.pop(_PARENT_PIPE)), os.environ.pop(_LOCK_FILE)
    os.set_inheritable(pipe, False)
    if lock:
        keep_inherited_lock(int(lock))
    # If a deadlock blocks the thread below, the kernel still kills this rank when its worker ends.
    if sys.platform == "linux":
        die_with_parent()
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)  # blocks until the worker, which alone has the writing end open, has ended
    os.kill(os.getpid(), signal.SIGKILL)


def exit_rank(main: Callable[[], int]) -> NoReturn:
    """Run `main`, flush logs and streams, then exit at once with the exit code that `main` returned.

    C++ destructors are skipped, because those of communication libraries can wait forever for a rank that has
    ended.
    """
    code = EXIT_FAILED
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
