"""Everything that can be known to be wrong with the data before a GPU hour is spent on it.

    report = check_corpus(open_corpus("imdb"), batch_size=16)
    print(report)               # rows, classes, what is wrong and where
    report.raise_if_bad()

The rows themselves are checked again wherever they are encoded, so nothing slips in behind a check.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oelm.data.catalogue import SPLITS
from oelm.data.corpus import Corpus
from oelm.data.problems import Problems
from oelm.data.splits import DuplicateReport, duplicates
from oelm.errors import OelmError, UsageError

if TYPE_CHECKING:
    from oelm.data.tokenize.tokenizers import Tokenizer


_STREAM_ROWS = 10_000  # of a split, when all of it would have to come over the network


@dataclass
class SplitCheck:
    """What one pass over one split found."""

    rows: int = 0
    bytes: int = 0
    labels: Counter[int] = field(default_factory=Counter)
    problems: Problems = field(default_factory=Problems)


@dataclass
class CheckReport:
    """All findings about a corpus. `errors` stop a training, `warnings` are worth reading."""

    name: str
    origin: str
    splits: dict[str, SplitCheck] = field(default_factory=dict)
    duplicates: DuplicateReport | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.errors

    def raise_if_bad(self) -> None:
        if self.errors:
            raise OelmError("\n".join(self.errors))

    def __str__(self) -> str:
        lines = [f"{self.name} from {self.origin}"]
        for split, check in self.splits.items():
            classes = ", ".join(f"{label}: {count:,}" for label, count in sorted(check.labels.items()))
            lines.append(
                f"  {split:10} {check.rows:>10,} rows {check.bytes / 1e6:>9.1f} MB  {classes}".rstrip()
            )
        if self.duplicates is not None:
            lines += [f"  {line}" for line in str(self.duplicates).splitlines()]
        lines += [f"  note: {warning}" for warning in self.warnings]
        lines += [f"  ERROR: {error}" for error in self.errors]
        lines.append("  all good" if self.ok else f"  {len(self.errors)} to mend")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        splits = {
            split: {
                "rows": check.rows,
                "bytes": check.bytes,
                "labels": {str(label): count for label, count in sorted(check.labels.items())},
                "bad_rows": check.problems.to_dict(),
            }
            for split, check in self.splits.items()
        }
        return {
            "dataset": self.name,
            "origin": self.origin,
            "ok": self.ok,
            "splits": splits,
            "duplicates": self.duplicates.to_dict() if self.duplicates is not None else None,
            "errors": self.errors,
            "warnings": self.warnings,
        }


def limit_streamed(corpus: Corpus) -> Corpus:
    """The corpus, or the beginning of one that comes over the network: reading all of it takes hours."""
    if not corpus.source.streamed:
        return corpus
    corpus = corpus.limit(train=_STREAM_ROWS, validation=_STREAM_ROWS, test=_STREAM_ROWS)
    corpus.notes.append("the rest of the stream is checked while it is tokenised")
    return corpus


def check_corpus(
    corpus: Corpus, *, batch_size: int = 1, skip_bad_rows: bool = False, find_duplicates: bool = True
) -> CheckReport:
    """Read every split once (twice with `find_duplicates`) and report all that is wrong, never row by row.

    batch_size: rows per batch; a train split with fewer is an error (for a classification; the windows of a
                language model are counted once there are tokens: `check_tokens`)
    """
    corpus = limit_streamed(corpus)
    report = CheckReport(corpus.name, corpus.origin, warnings=list(corpus.notes))
    for split in SPLITS:
        try:
            corpus.require(split)
        except OelmError as error:
            report.errors.append(str(error))
            continue
        report.splits[split] = check = _check_split(corpus, split)
        if check.problems:
            told = report.warnings if skip_bad_rows else report.errors
            told.append(f"{split}: {check.problems}" + (" (skipped)" if skip_bad_rows else ""))
        if not check.rows:
            report.errors.append(f"{split} has no good rows")
        elif corpus.task == "classification":
            _check_classes(corpus, split, check, batch_size, report)
    if find_duplicates:
        report.duplicates = duplicates(corpus)
    return report


def _check_split(corpus: Corpus, split: str) -> SplitCheck:
    check = SplitCheck()
    for row in corpus.rows(split, check.problems):
        check.rows += 1
        check.bytes += sum(len(row[name].encode("utf-8")) for name in corpus.fields)
        if "label" in row:
            check.labels[row["label"]] += 1
    return check


def _check_classes(
    corpus: Corpus, split: str, check: SplitCheck, batch_size: int, report: CheckReport
) -> None:
    unseen = [name for number, name in enumerate(corpus.label_names) if not check.labels[number]]
    if unseen:
        report.warnings.append(f"{split} has no row of class {', '.join(unseen)}")
    if check.rows < batch_size:
        small = f"{split} has {check.rows:,} rows, fewer than one batch of {batch_size:,}"
        (report.errors if split == "train" else report.warnings).append(small)


def check_tokens(tokens: int, context: int, batch_size: int, split: str = "train") -> None:
    """Raise unless the split's tokens fill one batch of windows."""
    if tokens < context * batch_size:
        raise UsageError(
            f"{split} has {tokens:,} tokens, which do not fill one batch of {batch_size} x {context}: "
            "take more text, a shorter context or a smaller batch"
        )


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, model: str = "the model") -> None:
    """Raise unless every id of the tokenizer has a row in the model's embedding of `vocab_size` rows."""
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"tokenizer '{tokenizer.name}' has {tokenizer.vocab_size:,} tokens but {model} only "
            f"{vocab_size:,} embeddings: use the model's own tokenizer, or a larger embedding"
        )
