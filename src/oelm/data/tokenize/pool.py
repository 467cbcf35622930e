"""Tokenize chunks of text in several worker processes, and return the results in order.

`multiprocessing` is not used: its workers either import the user's main script, which would run it again, or
are forked, which can deadlock if the parent process has threads. The workers of this module import only the
tokenizer code.
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
from typing import Any

import numpy as np

from oelm.data.tokenize.chunks import Chunk
from oelm.data.tokenize.tokenizers import Tokenizer
from oelm.errors import OelmError

# Workers start only after this many chunks: tokenizing fewer takes less time than starting the workers.
_CHUNKS_WITHOUT_WORKERS = 8

Columns = dict[str, np.ndarray]


def encode_chunks(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Chunk, Columns]]:
    """Yield (chunk, result of `chunk.encode(tokenizer)`) in order, computed by `workers` processes.

    With workers = 1, or for the first few chunks, this process computes them itself.
    """
    waiting = iter(chunks)
    for number, chunk in enumerate(waiting):
        yield chunk, chunk.encode(tokenizer)
        if workers > 1 and number + 1 == _CHUNKS_WITHOUT_WORKERS:
            break
    else:
        return
    with _Workers(tokenizer, workers) as pool:
        running: deque[tuple[Chunk, Future[Columns]]] = deque()
        for chunk in waiting:
            running.append((chunk, pool.submit(chunk)))
            if len(running) > 2 * workers:  # limits the number of chunks in memory
                done, columns = running.popleft()
                yield done, columns.result()
        for done, columns in running:
            yield done, columns.result()


class _Workers:
    """A pool of worker processes. For each worker, a thread sends chunks and waits for the results."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer.to_json()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenize")
        self._local = threading.local()
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            if worker.stdin:
                worker.stdin.close()  # a worker exits at the end of its input
            worker.wait()

    def submit(self, chunk: Chunk) -> Future[Columns]:
        return self._threads.submit(self._encode, chunk)

    def _encode(self, chunk: Chunk) -> Columns:
        worker = self._worker_of_this_thread()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            pickle.dump(chunk, worker.stdin, protocol=5)
            worker.stdin.flush()
            answer = pickle.load(worker.stdout)
        except (OSError, EOFError) as error:
            raise OelmError(
                f"a tokenizer process ended with exit code {worker.wait()}, perhaps because memory ran out: "
                "use fewer processes (`--threads`)"
            ) from error
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _worker_of_this_thread(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._local, "worker"):
            environment = {
                **os.environ,
                "RAYON_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            command = [sys.executable, "-m", "oelm.data.tokenize.pool"]
            pipe = subprocess.PIPE
            self._local.worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
            self._workers.append(self._local.worker)
            pickle.dump(self._tokenizer, self._local.worker.stdin, protocol=5)
        return self._local.worker


def _run_worker() -> None:
    """Read chunks from stdin, tokenize them and write the results to stdout, until stdin ends."""
    # Ignore Ctrl-C: the parent process then closes stdin, which ends the loop below.
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
        except Exception as error:  # sent to the parent process, which raises it
            answer = error
        pickle.dump(answer, sink, protocol=5)
        sink.flush()


if __name__ == "__main__":
    _run_worker()
