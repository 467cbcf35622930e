"""Start workers without waiting seconds for `import torch`: a server imports it once and forks each worker.

A local launcher with CPU slots has one server for each slot, which runs one worker at a time. The server runs
no torch operation, because torch would start threads, and a forked process does not have the threads of its
parent. A forked worker behaves like the process `python -m oelm.experiments.launch.worker`: it has its own
session and console.log, and the same signals and exit codes. Workers on GPUs are not forked, because CUDA
does not survive a fork.

The launcher sends JSON messages through a socket: the arguments of a new worker, or a signal for the running
one. The server answers "started" and later the exit code of the worker. If the launcher ends, a running
worker continues, and the server ends after it. If the server is killed, the kernel kills its worker.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from oelm.experiments.launch.signals import die_with_parent
from oelm.experiments.launch.slots import Slot
from oelm.experiments.launch.worker import CONSOLE
from oelm.runs.folder import RunFolder
from oelm.training.signals import signals_to_handle

_POLL_SECONDS = 0.05
_MESSAGE_BYTES = 1 << 16


def can_fork(slot: Slot) -> bool:
    """Return whether workers of this slot can be forked: on Linux, if a run is one process on the CPU."""
    on_gpu = slot.environment.get("CUDA_VISIBLE_DEVICES")
    return sys.platform == "linux" and slot.processes == 1 and not on_gpu


class WarmWorker:
    """The launcher's handle of one server and its worker, with methods like those of `subprocess.Popen`.

    `poll()` and `send_signal()` apply to the worker. `close()` ends the server; if a worker is running, the
    server ends after it.
    """

    def __init__(self, environment: dict[str, str], console: BinaryIO) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "oelm.experiments.launch.warm", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=console,  # for errors of the server itself; each worker opens its own console.log
                stderr=console,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket.setblocking(False)
        self._started = False
        self._code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether the server can start another worker."""
        return self._server.poll() is None

    def start(self, argv: Sequence[str]) -> None:
        """Start a worker with these arguments; the previous worker must have ended."""
        self._started, self._code = False, None
        self._send({"argv": list(argv)})

    def poll(self) -> int | None:
        """Return the exit code of the worker, -N if signal N killed it, or None while it runs.

        If the server ended before it reported the exit code, this is -SIGKILL.
        """
        # Called before the socket is read, so that the last answer of a server that has ended is also read.
        ended = self._server.poll()
        for answer in self._answers():
            if answer == "started":
                self._started = True
            elif self._code is None:
                self._code = int(answer)
        if self._code is None and ended is not None:
            self._code = -signal.SIGKILL if self._started else ended
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker.

        SIGKILL kills the server, too, and so does any signal that is sent before the worker has started.
        """
        if self.poll() is not None:
            return
        if self._started and number != signal.SIGKILL:
            self._send({"signal": int(number)})
        else:
            self._code = -number
            self._server.kill()

    def close(self) -> None:
        self._socket.close()
        if self._code is not None:  # otherwise a worker is running, and the server ends only after it
            self._server.wait()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the server has ended; `poll()` will report this
            self._socket.send(json.dumps(message).encode())

    def _answers(self) -> Iterator[str]:
        with contextlib.suppress(OSError):  # BlockingIOError: there is no further answer yet
            while answer := self._socket.recv(_MESSAGE_BYTES):
                yield answer.decode()


def serve(launcher: socket.socket) -> list[str]:
    """Fork workers until the launcher ends, then exit. Only a forked worker returns, with its arguments."""
    before = {number: signal.signal(number, _ignore) for number in signals_to_handle()}
    _import_training()
    gc.freeze()  # workers share the memory of the imported modules as long as garbage collection skips it
    _write_to(os.devnull)
    server = os.getpid()
    while message := _request(launcher):
        argv = json.loads(message).get("argv")
        if argv is None:  # the request was to signal a worker, and that worker has already ended
            continue
        with contextlib.suppress(Exception):  # the worker will have the same problem and report it
            _import_model_code(argv[0])
        # Block signals until the worker has its handlers; signals that arrive meanwhile are delivered then.
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        pid = os.fork()
        if pid == 0:
            launcher.close()
            _become_worker(server, argv[0])
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
            return list(argv)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        _answer(launcher, "started")
        _answer(launcher, str(_wait(pid, launcher)))
    os._exit(0)


def _ignore(number: int, frame: object) -> None:
    """Do nothing: if a cluster signals all processes, only the launcher decides whether to stop."""


def _import_training() -> None:
    """Import the modules that every run needs."""
    import tokenizers  # noqa: F401

    import oelm.training.fit  # noqa: F401


def _import_model_code(folder: str) -> None:
    """If the run in `folder` trains a transformers model, import the code of that model."""
    config = RunFolder(folder).config()
    if config.model.family != "gpt":
        from oelm.training.build_model import import_model_code

        import_model_code(config)


def _become_worker(server: int, folder: str) -> None:
    """Give this forked process its own session and console.log, and let it end if the server ends."""
    os.setsid()
    die_with_parent()
    if os.getppid() != server:  # the server had already ended
        os._exit(1)
    try:
        _write_to(str(Path(folder) / CONSOLE))
    except OSError:  # probably the disk is full; the run will find and report the same problem
        _write_to(os.devnull)
    random.seed()


def _write_to(path: str) -> None:
    """Append everything that this process prints to the file `path`."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _wait(pid: int, launcher: socket.socket) -> int:
    """Forward signals from the launcher to the worker `pid` until it ends; return the worker's exit code."""
    sources = [launcher]
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select(sources, [], [], _POLL_SECONDS)[0]:
            message = _request(launcher)
            if message:
                os.kill(pid, json.loads(message)["signal"])
            else:  # the launcher has ended
                sources = []


def _request(launcher: socket.socket) -> bytes:
    """Return the next message of the launcher; b"" if the launcher has ended."""
    try:
        return launcher.recv(_MESSAGE_BYTES)
    except ConnectionResetError:  # the launcher was killed before it read an answer
        return b""


def _answer(launcher: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended
        launcher.send(text.encode())


if __name__ == "__main__":
    argv = serve(socket.socket(fileno=int(sys.argv[1])))
    from oelm.experiments.launch import worker

    sys.argv = [worker.__file__, *argv]
    sys.exit(worker.main(argv))
