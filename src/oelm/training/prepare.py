"""Open and encode the data of a run, and build its tokenizer, model and task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from oelm.config.run_config import Machine, RunConfig
from oelm.data.batches.classification import EncodedSplit, encode_split
from oelm.data.corpus import Corpus
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.encoding import EncodingProgress
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.data.tokenize.tokens import TokenFile, prepare_tokens
from oelm.errors import OelmError, UsageError
from oelm.runs.schema import DataFacts, TokenizerFacts
from oelm.training.build_model import build_model, model_folder, model_type
from oelm.training.tasks.classification import Classification
from oelm.training.tasks.denoising import SENTINELS, Denoising, Noise
from oelm.training.tasks.lm import LanguageModelling
from oelm.training.tasks.task import Task

Report = Callable[[EncodingProgress], None]
Splits = Mapping[str, TokenFile | EncodedSplit]


@dataclass
class Prepared:
    """The task, model and tokenizer of a run, and the description of the data for manifest.json."""

    task: Task
    model: nn.Module
    tokenizer: Tokenizer
    data_facts: DataFacts

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        t = self.tokenizer
        return TokenizerFacts(t.name, t.hash, t.vocab_size)

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes of the data and the tokenizer, as in `Manifest.data_identity`."""
        return {"fingerprints": dict(self.data_facts.fingerprints), "tokenizer": self.tokenizer.hash}


def prepare(config: RunConfig, machine: Machine, report: Report | None = None) -> Prepared:
    """Open and tokenize the data of a run (or load the cached tokens), and build its model and task.

    `report` is called repeatedly while the data is tokenized.
    """
    folders: dict[str, Any] = {
        "data_dir": machine.data_dir or None,
        "cache_dir": machine.cache_dir or None,
    }
    corpus = open_corpus(
        config.data.dataset, variant=config.data.variant, source=config.data.source, **folders
    ).limit(train=config.data.train_rows, validation=config.data.eval_rows, test=config.data.eval_rows)
    tokenizer = load_tokenizer(
        config.data.tokenizer, corpus=corpus, model_folder=model_folder(config), **folders
    )
    _check_tokenizer_fits(config, tokenizer, machine)
    build = _classification if config.task == "classification" else _language
    encoding = {
        "cache_dir": machine.cache_dir or None,
        "workers": machine.threads,
        "progress": report,
        "skip_bad_rows": machine.skip_bad_rows,
    }
    task, model, splits = build(config, corpus, tokenizer, encoding)
    return Prepared(task, model, tokenizer, _facts(corpus, splits))


def splits_of(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the splits that a run uses; a tuning trial does not use the test split."""
    return ("train", "validation") if config.tune.trial else ("train", "validation", "test")


def _language(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer, encoding: dict[str, Any]
) -> tuple[Task, nn.Module, Splits]:
    splits = {split: prepare_tokens(corpus, split, tokenizer, **encoding) for split in splits_of(config)}
    for split, file in splits.items():
        if len(file) < 2:
            raise UsageError(
                f"the {split} split of {corpus.name} has {len(file)} tokens, but next-token prediction needs "
                "at least 2: use a dataset with more text"
            )
    rows = config.budget.rows_per_step
    shape = {"context": config.data.max_length, "rows_per_step": rows, "seed": config.seed}
    if config.task == "lm":
        model = _model(config, tokenizer, tokenizer.vocab_size, 0)
        return LanguageModelling(splits, **shape), model, splits
    vocabulary, noise = _noise(config, tokenizer)
    model = _model(config, tokenizer, vocabulary, 0)
    _check_embedding_size(model, vocabulary)
    return Denoising(splits, noise, **shape), model, splits


def _classification(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer, encoding: dict[str, Any]
) -> tuple[Task, nn.Module, Splits]:
    splits: dict[str, EncodedSplit] = {
        split: encode_split(corpus, split, tokenizer, config.data.max_length, **encoding)
        for split in splits_of(config)
    }
    classes = len(corpus.label_names)
    model = _model(config, tokenizer, tokenizer.vocab_size, classes)
    _check_embedding_size(model, tokenizer.vocab_size)
    task = Classification(
        splits,
        rows_per_step=config.budget.rows_per_step,
        seed=config.seed,
        segments=getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1,
        pad_to=config.data.max_length if config.data.pad_to_max else 0,
    )
    return task, model, splits


def _model(config: RunConfig, tokenizer: Tokenizer, vocabulary: int, classes: int) -> nn.Module:
    return build_model(
        config, vocab_size=vocabulary, classes=classes, pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id
    )


def _noise(config: RunConfig, tokenizer: Tokenizer) -> tuple[int, Noise]:
    """Return the vocabulary size with mask tokens, and the `Noise` that matches the model (T5 or BART).

    If the tokenizer has no mask tokens, they get new ids after its vocabulary.
    """
    style: Literal["t5", "bart"] = "bart" if "bart" in model_type(config) else "t5"
    names = ["<mask>"] if style == "bart" else [f"<extra_id_{i}>" for i in range(SENTINELS)]
    known = {entry["content"]: entry["id"] for entry in json.loads(tokenizer.to_json()[0])["added_tokens"]}
    if all(name in known for name in names):
        return tokenizer.vocab_size, Noise(style, tuple(known[name] for name in names), tokenizer.eos_id)
    first = tokenizer.vocab_size
    added = tuple(range(first, first + len(names)))
    return first + len(names), Noise(style, added, tokenizer.eos_id)


def _check_tokenizer_fits(config: RunConfig, tokenizer: Tokenizer, machine: Machine) -> None:
    """Raise UsageError if the tokenizer is not the one that the pretrained model was trained with."""
    chosen = config.data.tokenizer
    if not config.model.pretrained or chosen == "model":
        return
    try:
        own = load_tokenizer(
            "model", model_folder=model_folder(config), data_dir=machine.data_dir or None
        ).vocabulary()
    except OelmError:  # the model comes without a tokenizer, so only a new one is certainly another one
        own = {} if chosen.startswith("bpe-") else tokenizer.vocabulary()
    if tokenizer.vocabulary() != own:
        raise UsageError(
            f"data.tokenizer={chosen} is not the tokenizer of the pretrained model '{config.model.name}', so "
            "its embeddings would belong to other tokens: set data.tokenizer=model"
        )


def _check_embedding_size(model: nn.Module, vocabulary: int) -> None:
    size = getattr(getattr(model, "config", None), "vocab_size", vocabulary)
    if size < vocabulary:
        raise UsageError(
            f"the tokenizer has {vocabulary} tokens, but the model's embedding has only {size}: use the "
            "tokenizer of the model (data.tokenizer=model)"
        )


def _facts(corpus: Corpus, splits: Splits) -> DataFacts:
    return DataFacts(
        origin=corpus.origin,
        dataset=corpus.name,
        fingerprints={split: corpus.fingerprint(split) for split in splits},
        rows={split: encoded.meta["rows"] for split, encoded in splits.items()},
        tokens={split: len(encoded.ids) for split, encoded in splits.items()},
        folder_note=corpus.source.folder_note,
        notes=(*corpus.notes, *(f"{s}: bad rows left out: {n}" for s, n in corpus.skipped.items())),
    )
