"""The processes ("ranks") of one run on several GPUs of this machine: started, watched and ended here.

Not by torchrun: its store listens on every network interface, its exit code is 1 for every ending, and its
ranks may outlive it and go on writing (docs/decisions/0001-own-ranks.md). The ranks of a run

- find each other through a file in a private folder and talk over loopback only,
- end with the worker that started them, however that ends,
- hold the run's lock together with it, so that no second worker can start while one of them lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from oelm.errors import OelmError
from oelm.files.locks import Lock, keep_inherited_lock
from oelm.runs.folder import EXIT_CODES, EXIT_FAILED, RunFolder, State, Status
from oelm.training.signals import RANK_DIR, signals_to_handle

# Once one rank has ended, the others have this long: they only have to notice it.
_GRACE_SECONDS = 30.0
# Once the run folder holds a final state, the ranks have this long: trackers may still be uploading.
_FINAL_STATE_SECONDS = 300.0
_POLL_SECONDS = 0.1
_STATUS_SECONDS = 1.0

# Environment of a rank: open files that it inherits.
_PARENT_PIPE = "OELM_PARENT_PIPE"
_LOCK_FILE = "OELM_LOCK_FILE"


def run_ranks(command: list[str], count: int, folder: RunFolder, lock: Lock) -> int:
    """Start `count` processes of `command`, wait for all of them, return the exit code of the run."""
    return _Ranks(command, count, folder, lock).run()


@dataclass
class _Ranks:
    command: list[str]
    count: int
    folder: RunFolder
    lock: Lock
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    asked_to_stop: str = ""  # name of the signal
    killed: set[int] = field(default_factory=set)  # ranks that had to be ended from here

    def run(self) -> int:
        before = self.folder.status()
        self.attempt = before.attempt if before else 0
        # A rank sees the end of this pipe when the only writer, this process, is gone.
        reader, writer = os.pipe()
        with tempfile.TemporaryDirectory(prefix="oelm-ranks-", ignore_cleanup_errors=True) as private:
            self.private = Path(private)
            try:
                with self._forward_signals():
                    for rank in range(self.count):
                        self._start(rank, reader)
                    self._wait()
            finally:
                self._kill_living()
                os.close(reader)
                os.close(writer)
            return self._conclude()

    def _start(self, rank: int, pipe: int) -> None:
        inherited = [pipe, *([self.lock.file] if self.lock.file is not None else [])]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            RANK_DIR: str(self.private),
            _PARENT_PIPE: str(pipe),
            _LOCK_FILE: "" if self.lock.file is None else str(self.lock.file),
        }
        process = subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C reaches this process alone, which asks the ranks to stop
        )
        self.processes.append(process)
        if self.asked_to_stop:  # while it was being started
            process.send_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def _forward_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
            yield
            return
        old = {number: signal.signal(number, self._stop) for number in signals_to_handle()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        self.asked_to_stop = signal.Signals(number).name
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)

    def _wait(self) -> None:
        """Until every rank has ended; those that hang after the end of the run are killed."""
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
        """A rank has exited, or has reported a failure and may hang in the clean-up after it."""
        return len(self._living()) < self.count or bool(self._reports())

    def _stopped_before_training(self) -> bool:
        """The stop signal reached a rank before it had a handler; the others cannot train without it."""
        codes = [process.returncode for process in self.processes]
        return bool(self.asked_to_stop) and -signal.SIGTERM in codes

    def _kill_living(self) -> None:
        for rank in self._living():
            self.killed.add(rank)
            self.processes[rank].kill()
            self.processes[rank].wait()

    def _reports(self) -> list[dict[str, Any]]:
        """Failures that ranks other than 0 reported, earliest first."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in self.private.glob("rank-*.json")]
        return sorted(found, key=lambda report: report["time"])

    def _final_status(self) -> Status | None:
        """The status of this attempt at the run, once it is final."""
        with contextlib.suppress(OelmError):
            status = self.folder.status()
            if status is not None and status.attempt > self.attempt and status.state != "running":
                return status
        return None

    def _conclude(self) -> int:
        """Rank 0's exit code, unless another rank's failure is what ended the run."""
        status, code = self._final_status(), self.processes[0].returncode
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
        """State and reason when a rank was killed, or one other than 0 failed first: the rest only saw their
        connections close."""
        if status is not None and status.state != "failed":
            return None
        for rank, process in enumerate(self.processes):
            code = process.returncode
            if rank == 0 and status is not None:  # killed after its last word
                continue
            if code < 0 and rank not in self.killed and not self._stopped_before_training():
                return "failed", f"rank {rank} was {killed_by(code)}"
        for report in self._reports():
            if status is None or report["time"] < status.heartbeat:
                return report["state"], f"rank {report['rank']}: {report['reason']}"
        return None

    def _without_final_status(self, code: int) -> tuple[State, str]:
        """State and reason when rank 0 was killed before it could write them."""
        if self.asked_to_stop:
            return "interrupted", f"stopped by {self.asked_to_stop} before training; run it again to go on"
        for rank, process in enumerate(self.processes[1:], 1):
            if process.returncode > 0 and rank not in self.killed:
                return "failed", f"rank {rank} ended with exit code {process.returncode}; see its output"
        return "failed", f"rank 0 was {killed_by(code)}"


def killed_by(code: int) -> str:
    """ "killed by SIGKILL" for the exit code -9 that `subprocess` reports."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def follow_parent() -> None:
    """In a rank: keep the run's lock, and end when the worker that started this rank ends."""
    if _PARENT_PIPE not in os.environ:
        return
    pipe, lock = int(os.environ.pop(_PARENT_PIPE)), os.environ.pop(_LOCK_FILE)
    os.set_inheritable(pipe, False)
    if lock:
        keep_inherited_lock(int(lock))
    if sys.platform == "linux":  # also where a deadlock keeps the thread below from running
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns when the parent is gone
    os.kill(os.getpid(), signal.SIGKILL)


def in_rank() -> bool:
    """Whether this process is one of several of a run, started by a worker or by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def exit_rank(main: Callable[[], int]) -> NoReturn:
    """Run `main`, then end this process at once with its exit code.

    For processes that belong to oelm only. Everything is flushed, but no C++ destructor runs: those of the
    communication libraries can wait for each other or for a peer that is gone.
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
