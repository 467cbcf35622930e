"""Check a dataset before training: row counts, classes, bad rows, and texts that appear in two splits.

    report = check_corpus(open_corpus("imdb"), batch_size=16)
    print(report)

Rows are checked again when they are tokenized.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import SPLITS
from oelm.data.corpus import Corpus
from oelm.data.splits import DuplicateReport, find_duplicates
from oelm.errors import OelmError

_STREAM_ROWS = 10_000
_MAX_SHARED = 0.01  # public datasets often have a few equal rows in two splits, too few to change a result


@dataclass
class SplitCheck:
    """The rows, bytes, labels and bad rows of one split."""

    rows: int = 0
    bytes: int = 0
    labels: Counter[int] = field(default_factory=Counter)  # class index -> rows
    bad_rows: BadRows = field(default_factory=BadRows)


@dataclass
class CheckReport:
    """The result of `check_corpus()`. Training is possible with `warnings`, but not with `errors`."""

    name: str
    origin: str
    splits: dict[str, SplitCheck] = field(default_factory=dict)
    label_names: tuple[str, ...] = ()
    duplicates: DuplicateReport | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        lines = [f"{self.name} from {self.origin}"]
        for split, check in self.splits.items():
            counted = sorted(check.labels.items())
            classes = ", ".join(f"{self.label_names[label]}: {count:,}" for label, count in counted)
            counts = f"  {split:10} {check.rows:>10,} rows {check.bytes / 1e6:>9.1f} MB  {classes}"
            lines.append(counts.rstrip())
        if self.duplicates is not None:
            lines += [f"  {line}" for line in str(self.duplicates).splitlines()]
        lines += [f"  note: {warning}" for warning in self.warnings]
        lines += [f"  ERROR: {error}" for error in self.errors]
        lines.append("  no errors" if self.ok else f"  errors: {len(self.errors)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        splits = {
            split: {
                "rows": check.rows,
                "bytes": check.bytes,
                "labels": {str(label): count for label, count in sorted(check.labels.items())},
                "bad_rows": check.bad_rows.to_dict(),
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
    """Return `corpus`; if its rows are streamed over the network, limit it to 10,000 rows per split."""
    if not corpus.source.streamed:
        return corpus
    corpus = corpus.limit(train=_STREAM_ROWS, validation=_STREAM_ROWS, test=_STREAM_ROWS)
    corpus.notes.append("the other rows of the stream are checked when they are tokenised")
    return corpus


def check_corpus(
    corpus: Corpus, *, batch_size: int = 1, skip_bad_rows: bool = False, find_shared: bool = True
) -> CheckReport:
    """Read every split and return a report of all problems.

    batch_size:    report an error if a classification dataset has fewer train rows than this
    skip_bad_rows: report bad rows as warnings instead of errors
    find_shared:   also search for texts that appear in two splits, which reads the rows a second time; more
                   than 1 % of the rows of test or validation are an error
    """
    corpus = limit_streamed(corpus)
    report = CheckReport(
        corpus.name, corpus.origin, label_names=corpus.label_names, warnings=list(corpus.notes)
    )
    for split in SPLITS:
        try:
            corpus.require_split(split)
        except OelmError as error:
            report.errors.append(str(error))
            continue
        report.splits[split] = check = _check_split(corpus, split)
        if check.bad_rows:
            messages = report.warnings if skip_bad_rows else report.errors
            messages.append(f"{split}: {check.bad_rows}" + (" (skipped)" if skip_bad_rows else ""))
        if not check.rows:
            report.errors.append(f"{split} has no valid rows" + corpus.holdout_advice(split))
        elif corpus.task == "classification":
            _check_classes(corpus, split, check, batch_size, report)
    if find_shared:
        report.duplicates = find_duplicates(corpus)
        report.errors += [
            f"{100 * share:.1f} % of the rows of {other} also appear in {split} "
            f"(at most {100 * _MAX_SHARED:.0f} % is allowed), so scores on {other} are not those of "
            f"unseen rows: remove these rows from {split}"
            for (split, other), share in report.duplicates.shares.items()
            if share > _MAX_SHARED
        ]
    return report


def _check_split(corpus: Corpus, split: str) -> SplitCheck:
    check = SplitCheck()
    for row in corpus.rows(split, check.bad_rows):
        check.rows += 1
        check.bytes += sum(len(row[name].encode("utf-8")) for name in corpus.fields)
        if "label" in row:
            check.labels[row["label"]] += 1
    return check


def _check_classes(
    corpus: Corpus, split: str, check: SplitCheck, batch_size: int, report: CheckReport
) -> None:
    absent = [name for index, name in enumerate(corpus.label_names) if not check.labels[index]]
    if absent:
        report.warnings.append(f"{split} has no row of class {', '.join(absent)}")
    if split == "train" and len(check.labels) == 1:
        report.errors.append("all rows of train have the same class: add rows of another class")
    if check.rows < batch_size:
        messages = report.errors if split == "train" else report.warnings
        messages.append(f"{split} has {check.rows:,} rows, fewer than one batch of {batch_size:,}")
