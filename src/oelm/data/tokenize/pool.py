"""Encoding on several cores: plain child processes that each hold a tokenizer and answer chunks in order.

Not `multiprocessing`: its children import the caller's main module again (a script without a guard, a
notebook) or inherit its threads by fork. Ours import this room and nothing heavy.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from oelm.data.tokenize.tokenizers import Tokenizer
from oelm.errors import TransientError

_ALONE = 8  # so many chunks are encoded here before processes are worth starting


class Chunk(Protocol):
    """A piece of work: its own rows, and what a tokenizer makes of them."""

    def encode(self, tokenizer: Tokenizer) -> dict[str, np.ndarray]: ...


def encode_chunks(
    chunks: Iterable[Any], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """(chunk, its encoded columns) in order, on `workers` processes (1 = here)."""
    waiting = iter(chunks)
    for number, chunk in enumerate(waiting):
        yield chunk, chunk.encode(tokenizer)
        if workers > 1 and number + 1 == _ALONE:
            break
    else:
        return
    with _Workers(tokenizer, workers) as pool:
        underway: deque[tuple[Any, Future[dict[str, np.ndarray]]]] = deque()
        for chunk in waiting:
            underway.append((chunk, pool.submit(chunk)))
            if len(underway) > 2 * workers:  # bounds what is in memory
                done, answer = underway.popleft()
                yield done, answer.result()
        while underway:
            done, answer = underway.popleft()
            yield done, answer.result()


class _Workers:
    """One thread per child process: it hands over a chunk and waits for the answer."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer.to_json()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenize")
        self._local = threading.local()
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            if child.stdin:
                child.stdin.close()  # the end of its input is the end of its work
            child.wait()

    def submit(self, chunk: Any) -> Future[dict[str, np.ndarray]]:
        return self._threads.submit(self._ask, chunk)

    def _ask(self, chunk: Any) -> dict[str, np.ndarray]:
        child = self._child()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump(chunk, child.stdin, protocol=5)
            child.stdin.flush()
            answer = pickle.load(child.stdout)
        except (OSError, EOFError) as error:
            raise TransientError(
                f"a tokenising process ended with code {child.wait()}; out of memory?"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _child(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._local, "child"):
            alone = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # one core each
            self._local.child = subprocess.Popen(
                [sys.executable, "-m", "oelm.data.tokenize.pool"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            self._children.append(self._local.child)
            pickle.dump(self._tokenizer, self._local.child.stdin, protocol=5)
        return self._local.child


def _serve() -> None:
    """The child's whole life. Its input comes from the parent alone, and so does its end: not by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer.from_json(*pickle.load(source))
    while True:
        try:
            chunk = pickle.load(source)
        except EOFError:
            return
        try:
            answer: Any = chunk.encode(tokenizer)
        except Exception as error:  # the parent raises it
            answer = error
        pickle.dump(answer, sink, protocol=5)
        sink.flush()


if __name__ == "__main__":
    _serve()
