"""`python -m benchmarks tokenisation`: compare our encoder with `datasets.map` and loops over `tokenizers`.

The arms (tools) take turns on the same file, each with one thread. The result is megabytes of text per second
of CPU time, which changes little if the machine is busy. The arms do not do the same work: our encoder reads
the jsonl file and writes a token file with its content hash, the loops read the jsonl file and write an
array, and `datasets.map` is measured without reading the jsonl file and without writing an array.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oelm.bench.harness import Progress, ratio
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.data.tokenize.tokens import prepare_tokens

OURS = "oelm"


@dataclass(frozen=True)
class TokenisationBench:
    datasets: tuple[str, ...] = ("openwebtext", "wikitext2", "tinystories")
    tokenizers: tuple[str, ...] = ("gpt2", "bert-base-uncased")
    megabytes: float = 8.0  # size of the text that each arm encodes per round
    rounds: int = 7
    data_dir: str = ""


def run(bench: TokenisationBench, progress: Progress) -> dict[str, Any]:
    use_one_thread()
    found = []
    for dataset in bench.datasets:
        for name in bench.tokenizers:
            found.append(compare(dataset, load_tokenizer(name, data_dir=bench.data_dir or None), bench))
            progress(f"{dataset}, {name}: measured")
    return {"kind": "tokenisation", "comparisons": found}


def use_one_thread() -> None:
    """Limit the tokenizer libraries to one thread, and keep them from the network.

    Call this before they are first used, because they read the environment variables only once.
    """
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"  # the datasets are local


def compare(dataset: str, tokenizer: Tokenizer, bench: TokenisationBench) -> dict[str, Any]:
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = write_sample(dataset, bench.data_dir, int(bench.megabytes * 1e6), folder / "train.jsonl")
        arms = make_arms(folder, tokenizer)
        tokens = {name: arm() for name, arm in arms.items()}  # warm-up, and a check of the token counts
        if len(set(tokens.values())) != 1:
            raise AssertionError(f"the arms do not produce the same number of tokens: {tokens}")
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(bench.rounds):
            for name in order.sample(list(arms), len(arms)):
                start = time.process_time()
                arms[name]()
                seconds[name].append(time.process_time() - start)
    speeds = {name: float(np.median([size / 1e6 / s for s in series])) for name, series in seconds.items()}
    # Each round is passed to `ratio()` as one process, because rounds are independent of each other here.
    each = {name: [[s] for s in series] for name, series in seconds.items()}
    return {
        "dataset": dataset,
        "tokenizer": tokenizer.name,
        "megabytes": size / 1e6,
        "tokens": tokens[OURS],
        "megabytes_per_cpu_second": speeds,
        "ratio_to_ours": {name: ratio(each[name], each[OURS]).to_dict() for name in arms if name != OURS},
        "seconds": seconds,
    }


def write_sample(dataset: str, data_dir: str, size: int, path: Path) -> int:
    """Write training documents of about `size` bytes to `path` as jsonl; return the exact bytes of text."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in open_corpus(dataset, data_dir=data_dir or None).rows("train"):
            if written >= size:
                break
            file.write(json.dumps({"text": row["text"]}) + "\n")
            written += len(row["text"].encode())
    return written


def make_arms(folder: Path, tokenizer: Tokenizer) -> dict[str, Callable[[], int]]:
    """Return {arm: function}; each function encodes the sample and returns the number of tokens.

    The count includes one end-of-text token per document.
    """
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
                tokenizer._words.clear()  # empty the cache of words that the previous round filled
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
