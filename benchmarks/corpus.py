"""`python -m benchmarks corpus`: measure the time and the memory of `oelm data prepare` on large files.

The file has the documents of a dataset again and again. Each document starts with its number, so that no two
documents are equal. The memory is the largest sum of the resident memory of the command and its worker
processes, which is read every 0.2 seconds; pages that several processes share are counted in each of them.
"""

from __future__ import annotations

import itertools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.markdown import table
from oelm.bench.harness import Progress
from oelm.data.sources.open import open_corpus
from oelm.errors import OelmError

_SAMPLE_SECONDS = 0.2
_DISK_BYTES_PER_TEXT_BYTE = 2.0  # the jsonl file and its tokens
_HELD_OUT = 100  # documents of the validation and the test file


@dataclass(frozen=True)
class CorpusBench:
    dataset: str = "openwebtext"
    megabytes: tuple[int, ...] = (200, 2000)
    tokenizer: str = "gpt2"
    workers: int = 0  # 0 = one per core
    data_dir: str = ""


def run(bench: CorpusBench, progress: Progress) -> dict[str, Any]:
    corpus = open_corpus(bench.dataset, data_dir=bench.data_dir or None)
    documents = [row["text"] for row in corpus.rows("train")]
    rows = []
    for megabytes in bench.megabytes:
        with tempfile.TemporaryDirectory() as temporary:
            require_space(Path(temporary), megabytes)
            data = Path(temporary) / "data"
            data.mkdir()
            numbers = itertools.count()
            for split in ("validation", "test"):
                write_documents(documents, numbers, data / f"{split}.jsonl", count=_HELD_OUT)
            size = write_documents(documents, numbers, data / "train.jsonl", size=int(megabytes * 1e6))
            progress(f"{megabytes:,} MB are written; tokenizing them")
            rows.append({"bytes": size, **prepare(data, Path(temporary) / "cache", bench)})
            progress("{bytes:,} bytes: {seconds:.0f} s, {peak_bytes:,} bytes of memory".format(**rows[-1]))
    settings = asdict(replace(bench, data_dir=""))  # the path means nothing on another machine
    return {"kind": "corpus", "settings": settings, "sizes": rows}


def require_space(folder: Path, megabytes: int) -> None:
    needed = _DISK_BYTES_PER_TEXT_BYTE * megabytes * 1e6
    if shutil.disk_usage(folder).free < needed:
        raise OelmError(f"{folder} has less than {needed / 1e9:.1f} GB free: set TMPDIR to a larger disk")


def write_documents(
    documents: list[str], numbers: itertools.count[int], path: Path, *, count: int = 0, size: int = 0
) -> int:
    """Write `count` documents, or documents of about `size` bytes, as jsonl; return the bytes of text."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for done, number in enumerate(numbers):
            text = f"{number}. {documents[number % len(documents)]}"
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())
            if done + 1 >= count and written >= size:
                return written
    raise AssertionError("itertools.count() does not end")


def prepare(data: Path, cache: Path, bench: CorpusBench) -> dict[str, Any]:
    """Run `oelm data prepare` on the folder `data`; return its seconds, tokens and largest memory."""
    command = [sys.executable, "-m", "oelm", "data", "prepare", str(data), "--json"]
    command += ["--tokenizer", bench.tokenizer, "--cache-dir", str(cache), "--workers", str(bench.workers)]
    if bench.data_dir:
        command += ["--data-dir", bench.data_dir]
    start, cpu = time.perf_counter(), cpu_seconds_of_children()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(_SAMPLE_SECONDS)
        seconds = time.perf_counter() - start
        for file in (output, errors):
            file.seek(0)
        if process.returncode:
            raise OelmError(f"`oelm data prepare` failed: {errors.read().decode().strip()[-500:]}")
        facts = json.loads(output.read())
    return {
        "tokens": facts["splits"]["train"]["tokens"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds_of_children() - cpu,
        "peak_bytes": peak,
    }


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and of all processes that it has started."""
    total = 0
    try:
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:  # it has just ended
        pass
    return total


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines(result: dict[str, Any]) -> list[str]:
    """Return the result as a Markdown table."""
    head = ("text", "tokens", "time", "CPU time", "MB per CPU second", "peak memory")
    rows = [
        (
            f"{row['bytes'] / 1e6:,.0f} MB",
            f"{row['tokens']:,}",
            f"{row['seconds']:,.0f} s",
            f"{row['cpu_seconds']:,.0f} s",
            f"{row['bytes'] / 1e6 / row['cpu_seconds']:.1f}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        )
        for row in result["sizes"]
    ]
    return table(head, rows)
