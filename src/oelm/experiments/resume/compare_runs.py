"""Compare the folders of two finished runs with the same config, whose files should be equal byte by byte.

The compared files are metrics, results, predictions, freeze audit, best model and last checkpoint. Times,
host names and logs are not compared, because they differ between any two runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oelm.files.checksums import CHECKSUMS
from oelm.files.read import read_json
from oelm.runs.folder import RunFolder
from oelm.training.checkpoints.file import load_checkpoint


@dataclass(frozen=True)
class FileDifference:
    """How one file differs between two runs: the first differing value and the largest difference."""

    file: str
    where: str  # the first value that differs: "step 3, train, loss" or "model.blocks.0.attn.v.weight"
    largest: float | None = None  # largest absolute difference of floats and tensors; None if all are equal
    others: int = 0  # number of other values that differ: integers, names, missing fields
    step: int | None = None  # training step of the first row that differs; only for metrics.jsonl

    def __str__(self) -> str:
        size = "" if self.largest is None else f", by up to {self.largest:.3g}"
        return f"{self.file}: {self.where}{size}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_runs(one: Path, other: Path) -> list[FileDifference]:
    """Return the differences between two finished runs, at most one per file; [] if the runs are equal."""
    a, b = RunFolder(one), RunFolder(other)
    found = [_metrics(a, b)]
    for name in ("results.json", "predictions.json", "test_losses.json", "freeze_audit.json"):
        found.append(_file(one, other, name, read_json))
    # The file of checksums is not compared, because it is computed from the other files.
    for name in sorted((_names(a.best) | _names(b.best)) - {CHECKSUMS}):
        found.append(_file(one, other, f"best/{name}", _read_tensors))
    found.append(_file(one, other, a.latest.name, _read_checkpoint))
    return [difference for difference in found if difference is not None]


def _metrics(one: RunFolder, other: RunFolder) -> FileDifference | None:
    name = one.metrics_file.name
    if one.metrics_file.read_bytes() == other.metrics_file.read_bytes():
        return None
    a, b = ([row.to_json() for row in run.metrics()] for run in (one, other))
    found, first = [], None
    for row, twin in zip(a, b, strict=False):
        here = list(_differences(row, twin))
        if here and first is None:
            first = (row["step"], f"step {row['step']}, {row['kind']}, {here[0][0]}")
        found += here
    if first is None:
        return FileDifference(name, f"{len(a)} rows in one run, {len(b)} in the other", others=1)
    return replace(_summary(name, found), where=first[1], step=first[0])


def _file(one: Path, other: Path, name: str, read: Any) -> FileDifference | None:
    a, b = one / name, other / name
    if not a.exists() and not b.exists():
        return None
    if not a.exists() or not b.exists():
        return FileDifference(name, "exists only in one run", others=1)
    if a.read_bytes() == b.read_bytes():
        return None
    found = list(_differences(read(a), read(b)))
    return _summary(name, found) if found else FileDifference(name, "the values are equal, but not the bytes")


def _summary(name: str, found: list[tuple[str, float | None]]) -> FileDifference:
    sizes = [size for _, size in found if size is not None]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return FileDifference(name, found[0][0] + more, max(sizes, default=None), len(found) - len(sizes))


def _differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield (name, absolute difference) for every value that differs; a tensor counts as one value.

    The absolute difference is None unless both values are floats, or tensors of the same shape and dtype.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _differences(left, right, f"{where}[{number}]")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            yield where, None
        elif not torch.equal(a, b):
            yield where, float((a.double() - b.double()).abs().max())
    elif type(a) is not type(b) or a != b:
        yield where, abs(a - b) if isinstance(a, float) and isinstance(b, float) else None


def _names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def _read_checkpoint(path: Path) -> Any:
    # Leave out the hash of metrics.jsonl in the checkpoint, because `compare_runs()` compares that file.
    state = load_checkpoint(path)
    return {name: value for name, value in state.items() if not name.startswith("metrics_")}


def _read_tensors(path: Path) -> Any:
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    return {"bytes": path.read_bytes()}
