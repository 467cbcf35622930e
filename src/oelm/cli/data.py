"""`oelm data`: list the datasets, prepare datasets for training, or check a dataset."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from oelm.cli.options import (
    CacheDir,
    Catalogue,
    DataDir,
    Json,
    SkipBadRows,
    load_catalogues,
    require_writable_cache,
)
from oelm.cli.output import print, print_json, print_table
from oelm.cli.values import Count, PositiveCount
from oelm.data.catalogue import SPLITS, Dataset, datasets
from oelm.errors import UsageError
from oelm.printable import printable
from oelm.units import bytes_text, duration_text

if TYPE_CHECKING:
    from oelm.data.corpus import Corpus
    from oelm.data.tokenize.encoding import EncodingProgress, OnProgress
    from oelm.data.tokenize.tokenizers import Tokenizer

_PLAIN_SECONDS = 5.0
DatasetName = Annotated[str, Parameter(help="Dataset (`oelm data list`), folder, or file:a.jsonl,b.jsonl.")]


@Parameter(name="*")
@dataclass(frozen=True)
class SourceOptions:
    """Options that say where a dataset is read from, and how many rows are used."""

    variant: str = ""
    """Variant of the dataset, such as a language of xnli (`oelm data list`)."""
    source: Literal["auto", "local", "hub", "builtin"] = "auto"
    """Where to read the dataset from: --data-dir, the Hugging Face hub, or generated text."""
    data_dir: DataDir = ""
    rows: Count = 0
    """Use at most N rows of each split; 0 = all."""
    skip_bad_rows: SkipBadRows = False
    no_duplicates: bool = False
    """Do not search for texts that occur in more than one split."""
    catalogue: Catalogue = ()

    def open(self, name: str, cache_dir: str = "") -> Corpus:
        from oelm.data.sources.open import open_corpus

        load_catalogues(self.catalogue)
        corpus = open_corpus(
            name,
            variant=self.variant,
            source=self.source,
            data_dir=self.data_dir or None,
            cache_dir=cache_dir or None,
        )
        return corpus.limit(train=self.rows, validation=self.rows, test=self.rows) if self.rows else corpus


def list_datasets(*, data_dir: DataDir = "", catalogue: Catalogue = (), json: Json = False) -> None:
    """Print all datasets with their task, number of rows, place and description."""
    load_catalogues(catalogue)
    entries = list(datasets().values())
    if json:
        print_json([_facts(entry, data_dir) for entry in entries])
        return
    rows = [(e.name, e.shape, _sizes(e), _where(e, data_dir), e.about) for e in entries]
    print_table(("dataset", "task", "official rows", "found in", "about"), rows)
    print("\nvariants:")
    for entry in entries:
        if entry.variants:
            print(f"  {entry.name}: {', '.join(entry.variants)}")
    print(
        "\nyour own data: in place of a name, give a folder with train.jsonl (or csv, parquet, txt), "
        "or file:train.jsonl,test.jsonl"
    )


def _sizes(entry: Dataset) -> str:
    if entry.builtin:
        from oelm.data.synthetic.generate import split_sizes

        return " / ".join(f"{count:,}" for count in split_sizes(entry.builtin).values())
    return " / ".join(f"{count:,}" for count in entry.sizes.values()) or "-"


def _where(entry: Dataset, data_dir: str) -> str:
    """Return the place from which `--source auto` would read the dataset; does not use the network."""
    from oelm.data.sources.open import local_folder

    if entry.builtin:
        return "built in"
    if entry.package:
        import importlib.util

        return "package" if importlib.util.find_spec(entry.package) else "package (not installed)"
    return "folder" if local_folder(entry, data_dir) else ("hub" if entry.hub else "files")


def _facts(entry: Dataset, data_dir: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "task": entry.task,
        "shape": entry.shape,
        "fields": list(entry.fields),
        "label_names": list(entry.label_names),
        "hub": entry.hub,
        "config": entry.config,
        "sizes": dict(entry.sizes),
        "licence": entry.licence,
        "variants": {name: variant.about for name, variant in entry.variants.items()},
        "found_in": _where(entry, data_dir),
        "about": entry.about,
    }


def check(
    name: DatasetName,
    /,
    *,
    batch_size: Count = 1,
    source: SourceOptions = SourceOptions(),
    json: Json = False,
) -> int:
    """Read all rows of a dataset and print their problems; return exit code 1 if there are any.

    Parameters
    ----------
    batch_size
        Batch size of the planned training; a training split with fewer rows is a problem.
    """
    from oelm.data.checks import check_corpus

    report = check_corpus(
        source.open(name),
        batch_size=batch_size,
        skip_bad_rows=source.skip_bad_rows,
        find_shared=not source.no_duplicates,
    )
    if json:
        print_json(report.to_dict())
    else:
        print(report)
    return 0 if report.ok else 1


@Parameter(name="*")
@dataclass(frozen=True)
class TokenizeOptions:
    """Options that say how the text is tokenized, and where the tokens are stored."""

    tokenizer: str = "gpt2"
    """Tokenizer: gpt2, bpe-<vocabulary size> (trained on the dataset), a name on the hub, or a folder."""
    max_length: PositiveCount = 512
    """Maximum length of classification rows, in tokens."""
    cache_dir: CacheDir = ""
    workers: Count = 0
    """Processes that tokenize; 0 = one per core."""


def prepare(
    *names: DatasetName,
    tokens: TokenizeOptions = TokenizeOptions(),
    source: SourceOptions = SourceOptions(),
    json: Json = False,
) -> None:
    """Download, check and tokenize datasets.

    If a dataset lacks a split, the other splits are prepared before the error is raised.
    """
    from oelm.data.tokenize.tokenizer_files import check_tokenizer_name

    if not names:
        raise UsageError("no dataset given: name at least one (`oelm data list`)")
    check_tokenizer_name(tokens.tokenizer, source.data_dir or None)
    require_writable_cache(tokens.cache_dir)
    corpora = [source.open(name, tokens.cache_dir) for name in names]
    facts = [_prepare_corpus(corpus, tokens, source, json) for corpus in corpora]
    if json:
        print_json(facts if len(facts) > 1 else facts[0])
    for corpus in corpora:
        for split in SPLITS:
            corpus.require_split(split)


def _prepare_corpus(
    corpus: Corpus, tokens: TokenizeOptions, source: SourceOptions, quiet: bool
) -> dict[str, Any]:
    from oelm.data.checks import limit_streamed
    from oelm.data.splits import find_duplicates
    from oelm.data.tokenize.tokenizers import load_tokenizer

    lines = [f"{corpus.name} ({corpus.dataset.shape}) from {corpus.origin}"]
    if corpus.source.folder_note:
        lines.append(f"  dataset_info.json says: {corpus.source.folder_note}")
    _print_unless(quiet, *lines, *(f"  note: {note}" for note in corpus.notes))
    tokenizer = load_tokenizer(
        tokens.tokenizer,
        corpus=corpus,
        data_dir=source.data_dir or None,
        cache_dir=tokens.cache_dir or None,
    )
    splits = {}
    for split in corpus.splits:
        splits[split], line = _prepare_split(corpus, split, tokenizer, tokens, source.skip_bad_rows)
        _print_unless(quiet, line)
    found = None if source.no_duplicates else find_duplicates(limit_streamed(corpus))
    _print_unless(quiet, *(f"  {line}" for line in str(found or "").splitlines()))
    return {
        "dataset": corpus.name,
        "origin": corpus.origin,
        "notes": corpus.notes,
        "tokenizer": {
            "name": tokenizer.name,
            "hash": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
        },
        "splits": splits,
        "skipped": corpus.skipped,
        "duplicates": found.to_dict() if found is not None else None,
    }


def _prepare_split(
    corpus: Corpus, split: str, tokenizer: Tokenizer, tokens: TokenizeOptions, skip_bad_rows: bool
) -> tuple[dict[str, Any], str]:
    """Tokenize one split and store the tokens in the cache; return the sizes as a dict and as text."""
    from oelm.data.batches.classification import BatchPlan, encode_split
    from oelm.data.tokenize.tokens import prepare_tokens

    options: dict[str, Any] = {
        "cache_dir": tokens.cache_dir or None,
        "workers": tokens.workers,
        "skip_bad_rows": skip_bad_rows,
    }
    facts: dict[str, Any]
    with _ProgressBar(f"{corpus.name}/{split}") as progress:
        if corpus.task == "lm":
            made = prepare_tokens(corpus, split, tokenizer, progress=progress, **options)
            meta, line = made.meta, f"{len(made):,} tokens of {made.documents:,} documents"
            facts = {"tokens": len(made), "documents": made.documents}
        else:
            encoded = encode_split(corpus, split, tokenizer, tokens.max_length, progress=progress, **options)
            plan = BatchPlan(encoded.lengths, 16, 0)
            share, share_to_max = plan.padding_share(), plan.padding_share(pad_to=tokens.max_length)
            meta, line = encoded.meta, f"{len(encoded):,} rows of {encoded.lengths.mean():.0f} tokens"
            line += f"; padding {100 * share:.1f} % in batches of 16"
            line += f" ({100 * share_to_max:.1f} % if padded to {tokens.max_length})"
            facts = {"rows": len(encoded), "padding_share": share, "padding_share_to_max": share_to_max}
    skipped = sum(meta["bad_rows"].values())
    line += f"; {skipped:,} bad rows skipped" if skipped else ""
    facts |= {"fingerprint": corpus.fingerprint(split), "bad_rows": meta["bad_rows"]}
    return facts, f"  {split:10} {line}"


def _print_unless(quiet: bool, *lines: str) -> None:
    for line in lines if not quiet else ():
        print(line)


class _ProgressBar:
    """Shows the progress of tokenizing: as a bar on a terminal, otherwise as a line every few seconds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()

    def __enter__(self) -> OnProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),  # a path may contain what looks like markup
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(printable(self._name), total=None)
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, now: EncodingProgress) -> None:
        line = f"{self._name}: {now.rows:,} rows, {bytes_text(now.bytes)}"
        line += f", {now.megabytes_per_second:.1f} MB/s"
        if self._bar is not None:
            total = None if now.share is None else 1.0
            self._bar.update(self._task, completed=now.share or 0.0, total=total, description=printable(line))
        elif time.monotonic() - self._last > _PLAIN_SECONDS:
            self._last = time.monotonic()
            if now.share is not None:
                line += f", {100 * now.share:.0f} %, {duration_text(now.eta_seconds)} left"
            print(line, file=sys.stderr, flush=True)
