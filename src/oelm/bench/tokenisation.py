"""`oelm bench tokenisation`: ours, `datasets.map` with the fast tokenizer, plain `tokenizers` loops.

Arms take turns on the same file, each with one thread. Megabytes of text per second of CPU time, so that
a busy machine does not decide. Ours is timed from the jsonl file to the finished token file on disk, content
hash included; the plain loops from the file to an array on disk; `datasets.map` without its loading and
without writing an array, which a user has to add.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.bench.interleave import ratio, require_rounds
from oelm.bench.results import load, record
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.data.tokenize.tokens import prepare_tokens

OURS = "oelm"


def one_thread() -> None:
    """One thread for everything; the libraries read this when they are first used, so call it before."""
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@dataclass(frozen=True)
class TokenisationBench:
    datasets: tuple[str, ...] = ("openwebtext", "wikitext2", "tinystories")
    tokenizers: tuple[str, ...] = ("gpt2", "bert-base-uncased")
    megabytes: float = 8.0  # text per arm and round
    rounds: int = 7
    data_dir: str = ""

    def __post_init__(self) -> None:
        require_rounds(self.rounds)


def run(bench: TokenisationBench, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    before = load()
    one_thread()
    found = []
    for dataset in bench.datasets:
        for name in bench.tokenizers:
            tokenizer = load_tokenizer(name, data_dir=bench.data_dir or None)
            found.append(compare(dataset, tokenizer, bench))
            progress(describe(found[-1]))
    return record("tokenisation", before, comparisons=found)


def compare(dataset: str, tokenizer: Tokenizer, bench: TokenisationBench) -> dict[str, Any]:
    """Every arm once per round, in an order that rotates."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = write_sample(dataset, bench.data_dir, int(bench.megabytes * 1e6), folder / "train.jsonl")
        arms = make_arms(folder, tokenizer)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        names = list(arms)
        tokens = {name: arms[name]() for name in names}  # warm-up, and proof that all do the same work
        if len(set(tokens.values())) != 1:
            raise AssertionError(f"the arms disagree: {tokens}")
        for number in range(bench.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                start = time.process_time()
                arms[name]()
                seconds[name].append(time.process_time() - start)
    speeds = {name: [size / 1e6 / taken for taken in series] for name, series in seconds.items()}
    return {
        "dataset": dataset,
        "tokenizer": tokenizer.name,
        "megabytes": size / 1e6,
        "tokens": tokens[OURS],
        "megabytes_per_cpu_second": {name: float(np.median(series)) for name, series in speeds.items()},
        "ratio_to_ours": {
            name: asdict(ratio(series, seconds[OURS])) for name, series in seconds.items() if name != OURS
        },
        "seconds": seconds,
    }


def describe(found: dict[str, Any]) -> str:
    lines = [f"{found['dataset']}, {found['tokenizer']}, {found['megabytes']:.1f} MB"]
    for name, speed in found["megabytes_per_cpu_second"].items():
        slower = found["ratio_to_ours"].get(name)
        beside = (
            f"  oelm is {slower['median']:.2f}x [{slower['low']:.2f}, {slower['high']:.2f}]" if slower else ""
        )
        lines.append(f"  {name:24} {speed:6.2f} MB/s per core{beside}")
    return "\n".join(lines)


def write_sample(dataset: str, data_dir: str, size: int, path: Path) -> int:
    """The first documents of train, up to `size` bytes, as jsonl; how many bytes of text that is."""
    texts = [row["text"] for row in open_corpus(dataset, data_dir=data_dir or None).rows("train")]
    written, number = 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size and number < len(texts):
            text = texts[number]
            file.write(json.dumps({"text": text}) + "\n")
            written, number = written + len(text.encode()), number + 1
    return written


def make_arms(folder: Path, tokenizer: Tokenizer) -> dict[str, Callable[[], int]]:
    """Each turns the sample into ids and returns how many, document ends included."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    path = folder / "train.jsonl"
    inner, eos = tokenizer._inner, tokenizer.eos_id
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "hf"))

    def ours() -> int:
        with tempfile.TemporaryDirectory() as cache:
            if tokenizer._words is not None:
                tokenizer._words.clear()  # nothing is remembered from the round before
            corpus = open_corpus(f"file:{path},{path},{path}", cache_dir=cache)
            return len(prepare_tokens(corpus, "train", tokenizer, cache_dir=cache, workers=1))

    def datasets_map() -> int:
        def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            return {"ids": fast(rows["text"], add_special_tokens=False)["input_ids"]}

        mapped = loaded.map(encode, batched=True, remove_columns=["text"], load_from_cache_file=False)
        return sum(len(ids) + 1 for ids in mapped.with_format("arrow")["ids"])

    def loop() -> int:
        count = 0
        with open(path, encoding="utf-8") as lines, open(folder / "loop.bin", "wb") as sink:
            for line in lines:
                ids = inner.encode(json.loads(line)["text"], add_special_tokens=False).ids
                sink.write(np.array([*ids, eos], dtype=tokenizer.dtype).tobytes())
                count += len(ids) + 1
        return count

    def batched_loop() -> int:
        count, held = 0, []
        with open(path, encoding="utf-8") as lines, open(folder / "batched.bin", "wb") as sink:
            for line in [*lines, None]:
                if line is not None:
                    held.append(json.loads(line)["text"])
                if held and (line is None or len(held) == 1000):
                    for encoded in inner.encode_batch_fast(held, add_special_tokens=False):
                        sink.write(np.array([*encoded.ids, eos], dtype=tokenizer.dtype).tobytes())
                        count += len(encoded.ids) + 1
                    held = []
        return count

    return {OURS: ours, "datasets.map": datasets_map, "encode": loop, "encode_batch_fast": batched_loop}
