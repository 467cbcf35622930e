"""From a config to what the loop needs: data, tokenizer, network, task, and the facts for the manifest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from oelm.config.limits import check_config
from oelm.config.run_config import Machine, RunConfig
from oelm.data.batches.classification import EncodedSplit, encode_split
from oelm.data.corpus import Corpus
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.encoding import EncodingProgress
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.data.tokenize.tokens import TokenFile, prepare_tokens
from oelm.errors import UsageError
from oelm.training.networks import build_network, model_folder
from oelm.training.tasks.classification import Classification
from oelm.training.tasks.denoising import SENTINELS, Denoising, Noise
from oelm.training.tasks.lm import LanguageModelling
from oelm.training.tasks.task import Task

Tick = Callable[[EncodingProgress], None]
Splits = Mapping[str, TokenFile | EncodedSplit]


@dataclass
class Prepared:
    """Everything that depends on data and files."""

    task: Task
    model: nn.Module
    tokenizer: Tokenizer
    data_facts: dict[str, Any]

    @property
    def tokenizer_facts(self) -> dict[str, Any]:
        t = self.tokenizer
        return {"name": t.name, "hash": t.hash, "vocab_size": t.vocab_size}

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes of the data and the tokenizer: a resumed run must find the same."""
        return {"fingerprints": dict(self.data_facts["fingerprints"]), "tokenizer": self.tokenizer.hash}


def prepare(config: RunConfig, machine: Machine, tick: Tick | None = None) -> Prepared:
    """Open the data, encode it (or find it encoded), build the network and the task."""
    check_config(config, machine.data_dir)
    corpus = open_corpus(
        config.data.dataset,
        variant=config.data.variant,
        source=config.data.source,
        data_dir=machine.data_dir or None,
        cache_dir=machine.cache_dir or None,
    ).limit(train=config.data.train_rows, validation=config.data.eval_rows, test=config.data.eval_rows)
    tokenizer = load_tokenizer(
        config.data.tokenizer,
        corpus=corpus,
        model_folder=model_folder(config),
        data_dir=machine.data_dir or None,
        cache_dir=machine.cache_dir or None,
    )
    build = _classification if config.task == "classification" else _language
    task, model, splits = build(config, machine, corpus, tokenizer, tick)
    return Prepared(task, model, tokenizer, _facts(corpus, splits))


def splits_of(config: RunConfig) -> tuple[str, ...]:
    """A tuning trial never sees the test split."""
    return ("train", "validation") if config.tune.trial else ("train", "validation", "test")


def rows_per_step(config: RunConfig) -> int:
    return config.budget.batch_size * config.budget.accumulation


def _language(
    config: RunConfig, machine: Machine, corpus: Corpus, tokenizer: Tokenizer, tick: Tick | None
) -> tuple[Task, nn.Module, Splits]:
    splits = {
        split: prepare_tokens(
            corpus,
            split,
            tokenizer,
            cache_dir=machine.cache_dir or None,
            workers=machine.threads,
            progress=tick,
            skip_bad_rows=machine.skip_bad_rows,
        )
        for split in splits_of(config)
    }
    for split, file in splits.items():
        if len(file) < 2:
            raise UsageError(f"{corpus.name}/{split} has {len(file)} tokens: nothing to predict")
    shape = {"context": config.data.max_length, "rows_per_step": rows_per_step(config), "seed": config.seed}
    if config.task == "lm":
        model = _network(config, tokenizer, tokenizer.vocab_size, 0)
        return LanguageModelling(splits, **shape), model, splits
    vocabulary, noise = _noise(config, tokenizer)
    model = _network(config, tokenizer, vocabulary, 0)
    _must_fit_embedding(model, vocabulary)
    return Denoising(splits, noise, **shape), model, splits


def _classification(
    config: RunConfig, machine: Machine, corpus: Corpus, tokenizer: Tokenizer, tick: Tick | None
) -> tuple[Task, nn.Module, Splits]:
    splits: dict[str, EncodedSplit] = {
        split: encode_split(
            corpus,
            split,
            tokenizer,
            config.data.max_length,
            cache_dir=machine.cache_dir or None,
            workers=machine.threads,
            progress=tick,
            skip_bad_rows=machine.skip_bad_rows,
        )
        for split in splits_of(config)
    }
    classes = len(corpus.label_names)
    model = _network(config, tokenizer, tokenizer.vocab_size, classes)
    _must_fit_embedding(model, tokenizer.vocab_size)
    task = Classification(
        splits,
        rows_per_step=rows_per_step(config),
        seed=config.seed,
        segments=getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1,
        pad_to=config.data.max_length if config.data.pad_to_max else 0,
    )
    return task, model, splits


def _network(config: RunConfig, tokenizer: Tokenizer, vocabulary: int, classes: int) -> nn.Module:
    return build_network(
        config, vocab_size=vocabulary, classes=classes, pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id
    )


def _noise(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, Noise]:
    """The vocabulary with room for what hides text, and the noise of the model's family."""
    style: Literal["t5", "bart"] = "bart" if "bart" in config.model.name.lower() else "t5"
    names = ["<mask>"] if style == "bart" else [f"<extra_id_{i}>" for i in range(SENTINELS)]
    known = {entry["content"]: entry["id"] for entry in json.loads(tokenizer.to_json()[0])["added_tokens"]}
    if all(name in known for name in names):
        return tokenizer.vocab_size, Noise(style, tuple(known[name] for name in names), tokenizer.eos_id)
    first = tokenizer.vocab_size
    hidden = tuple(range(first, first + len(names)))
    return first + len(names), Noise(style, hidden, tokenizer.eos_id)


def _must_fit_embedding(model: nn.Module, vocabulary: int) -> None:
    size = getattr(getattr(model, "config", None), "vocab_size", vocabulary)
    if size < vocabulary:
        raise UsageError(
            f"the tokenizer has {vocabulary} tokens, the model's embedding only {size}; "
            "use the model's own tokenizer (data.tokenizer = model)"
        )


def _facts(corpus: Corpus, splits: Splits) -> dict[str, Any]:
    return {
        "origin": corpus.origin,
        "dataset": corpus.name,
        "fingerprints": {split: corpus.fingerprint(split) for split in splits},
        "rows": {split: encoded.meta["rows"] for split, encoded in splits.items()},
        "tokens": {split: len(encoded.ids) for split, encoded in splits.items()},
        "folder_note": corpus.source.folder_note,
        "notes": [*corpus.notes, *(f"{s}: bad rows left out: {n}" for s, n in corpus.skipped.items())],
    }
