"""`oelm data`: list the datasets, prepare one for training, check one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from oelm.cli.options import add_catalogue, add_json, command_parser, load_own, require_writable
from oelm.cli.output import print, print_json, print_table
from oelm.data.catalogue import SPLITS, Dataset, datasets
from oelm.printable import printable
from oelm.units import bytes_text, duration_text

if TYPE_CHECKING:
    from oelm.data.corpus import Corpus
    from oelm.data.tokenize.encoding import EncodingProgress, OnProgress
    from oelm.data.tokenize.tokenizers import Tokenizer

_PLAIN_SECONDS = 5.0


def add_parser(subparsers: Any) -> None:
    example = "oelm data prepare tinystories --data-dir data --tokenizer gpt2"
    parser = command_parser(subparsers, "data", "list the datasets, prepare one, check one", example)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="all datasets: task, classes, official sizes, licence")
    listed.add_argument("--data-dir", default="", metavar="DIR", help="also say what this folder holds")
    add_catalogue(listed)
    add_json(listed)
    prepare = actions.add_parser(
        "prepare", help="fetch, check and tokenise, so that a training starts at once"
    )
    _add_source(prepare)
    prepare.add_argument(
        "--tokenizer", default="gpt2", help="gpt2, bpe-<size>, or a tokenizer's name or folder"
    )
    prepare.add_argument("--max-length", type=int, default=512, help="cut of classification rows, in tokens")
    prepare.add_argument("--cache-dir", default="", metavar="DIR", help="where to (or OELM_CACHE_DIR)")
    prepare.add_argument("--workers", type=int, default=0, help="processes; 0 = one per core")
    check = actions.add_parser("check", help="read all rows and report what is wrong, before a training does")
    _add_source(check)
    check.add_argument("--batch-size", type=int, default=1, help="rows that train must at least have")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="a dataset (`oelm data list`), a folder, or file:a.jsonl,b.jsonl"
    )
    parser.add_argument("--variant", default="", help="a language of xnli, mismatched of mnli, ...")
    parser.add_argument("--source", default="auto", help="auto, local, hub or builtin")
    parser.add_argument("--data-dir", default="", metavar="DIR", help="local datasets (or OELM_DATA_DIR)")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="at most N rows of each split")
    parser.add_argument("--skip-bad-rows", action="store_true", help="leave broken rows out and count them")
    parser.add_argument("--no-duplicates", action="store_true", help="do not look for texts in two splits")
    add_catalogue(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    load_own(args)
    return {"list": _list, "prepare": _prepare, "check": _check}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    entries = list(datasets().values())
    if args.json:
        print_json([_facts(entry, args.data_dir) for entry in entries])
        return 0
    rows = [(e.name, e.shape, _sizes(e), _where(e, args.data_dir), e.about) for e in entries]
    print_table(("dataset", "task", "official rows", "found in", "about"), rows)
    print("\nvariants:")
    for entry in entries:
        if entry.variants:
            print(f"  {entry.name}: {', '.join(entry.variants)}")
    print("\nyour own: a folder with train.jsonl (or csv, parquet, txt), or file:train.jsonl,test.jsonl")
    return 0


def _sizes(entry: Dataset) -> str:
    if entry.builtin:
        from oelm.data.synthetic.stories import sizes

        return " / ".join(f"{count:,}" for count in sizes(entry.builtin).values())
    return " / ".join(f"{count:,}" for count in entry.sizes.values()) or "-"


def _where(entry: Dataset, data_dir: str) -> str:
    """The source that `auto` would take, without touching the network."""
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


def _open(args: argparse.Namespace) -> Corpus:
    from oelm.data.sources.open import open_corpus

    cache = getattr(args, "cache_dir", "") or None
    corpus = open_corpus(
        args.name, variant=args.variant, source=args.source, data_dir=args.data_dir or None, cache_dir=cache
    )
    return corpus.limit(train=args.rows, validation=args.rows, test=args.rows) if args.rows else corpus


def _check(args: argparse.Namespace) -> int:
    from oelm.data.checks import check_corpus

    report = check_corpus(
        _open(args),
        batch_size=args.batch_size,
        skip_bad_rows=args.skip_bad_rows,
        find_duplicates=not args.no_duplicates,
    )
    if args.json:
        print_json(report.to_dict())
    else:
        print(report)
    return 0 if report.ok else 1


def _prepare(args: argparse.Namespace) -> int:
    from oelm.data.checks import limit_streamed
    from oelm.data.splits import duplicates
    from oelm.data.tokenize.tokenizer_files import check_tokenizer_name
    from oelm.data.tokenize.tokenizers import load_tokenizer

    check_tokenizer_name(args.tokenizer, args.data_dir or None)
    if cache := args.cache_dir or os.environ.get("OELM_CACHE_DIR", ""):
        require_writable(cache, "--cache-dir / OELM_CACHE_DIR")
    corpus = _open(args)
    _say(args, f"{corpus.name} ({corpus.dataset.shape}) from {corpus.origin}")
    if corpus.source.folder_note:
        _say(args, f"  dataset_info.json says: {corpus.source.folder_note}")
    for note in corpus.notes:
        _say(args, f"  note: {note}")
    tokenizer = load_tokenizer(
        args.tokenizer, corpus=corpus, data_dir=args.data_dir or None, cache_dir=args.cache_dir or None
    )
    facts = {split: _prepare_split(args, corpus, split, tokenizer) for split in corpus.splits}
    found = None if args.no_duplicates else duplicates(limit_streamed(corpus))
    _say(args, "" if found is None else "\n".join(f"  {line}" for line in str(found).splitlines()))
    if args.json:
        tokens = {"name": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size}
        about: dict[str, Any] = {"dataset": corpus.name, "origin": corpus.origin, "notes": corpus.notes}
        shared = found.to_dict() if found is not None else None
        about |= {"tokenizer": tokens, "splits": facts, "skipped": corpus.skipped, "duplicates": shared}
        print_json(about)
    for split in SPLITS:
        corpus.require(split)  # what is missing is an error, after all that is there has been prepared
    return 0


def _prepare_split(
    args: argparse.Namespace, corpus: Corpus, split: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    from oelm.data.batches.classification import BatchPlan, encode_split
    from oelm.data.tokenize.tokens import prepare_tokens

    options: dict[str, Any] = {
        "cache_dir": args.cache_dir or None,
        "workers": args.workers,
        "skip_bad_rows": args.skip_bad_rows,
    }
    facts: dict[str, Any]
    with _progress(f"{corpus.name}/{split}") as report:
        if corpus.task == "lm":
            tokens = prepare_tokens(corpus, split, tokenizer, progress=report, **options)
            meta, said = tokens.meta, f"{len(tokens):,} tokens of {tokens.documents:,} documents"
            facts = {"tokens": len(tokens), "documents": tokens.documents}
        else:
            encoded = encode_split(corpus, split, tokenizer, args.max_length, progress=report, **options)
            plan = BatchPlan(encoded.lengths, 16, 0)
            ours, theirs = plan.padding_share(), plan.padding_share(pad_to=args.max_length)
            meta, said = encoded.meta, f"{len(encoded):,} rows of {encoded.lengths.mean():.0f} tokens"
            said += f"; padding {ours:.1%} in batches of 16 ({theirs:.1%} if padded to {args.max_length})"
            facts = {"rows": len(encoded), "padding_share": ours, "padding_share_to_max": theirs}
    skipped = sum(meta["bad_rows"].values())
    said += f"; {skipped:,} bad rows skipped" if skipped else ""
    _say(args, f"  {split:10} {said}")
    return {**facts, "fingerprint": corpus.fingerprint(split), "bad_rows": meta["bad_rows"]}


def _say(args: argparse.Namespace, text: str) -> None:
    if text and not args.json:
        print(text)


class _progress:
    """Shows a running tokenisation: a bar on a terminal, a line every few seconds elsewhere."""

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
                TextColumn("{task.description}", markup=False),  # a dataset's name is a path, not markup
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
        said = (
            f"{self._name}: {now.rows:,} rows, {bytes_text(now.bytes)}, {now.megabytes_per_second:.1f} MB/s"
        )
        if self._bar is not None:
            total = None if now.share is None else 1.0
            self._bar.update(self._task, completed=now.share or 0.0, total=total, description=printable(said))
        elif time.monotonic() - self._last > _PLAIN_SECONDS:
            self._last = time.monotonic()
            share = "" if now.share is None else f", {now.share:.0%}, {duration_text(now.eta_seconds)} left"
            print(said + share, file=sys.stderr, flush=True)
