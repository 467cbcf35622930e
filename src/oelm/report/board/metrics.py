"""Read the measurements of a run repeatedly: each time, only what was appended since the last time."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from oelm.analysis.messages import Message
from oelm.errors import OelmError
from oelm.files.read import MIB, parse_json_lines
from oelm.runs.reader import RunReader
from oelm.runs.schema import MetricsRow

# Name of a measurement that the board can draw -> its label in the list from which the user chooses.
MEASUREMENTS: dict[str, Message] = {
    "ppl": Message("validation perplexity"),
    "accuracy": Message("validation accuracy"),
    "validation_loss": Message("validation loss"),
    "loss": Message("training loss"),
    "lr": Message("learning rate"),
    "grad_norm": Message("gradient norm"),
    "step_time": Message("step time, seconds"),
    "memory": Message("peak memory so far, GiB"),
    "entropy": Message("entropy of attention, nats"),
}
# Name of a measurement -> (kind of row, field) in metrics.jsonl that contains it.
_FIELDS = {
    "ppl": ("validation", "ppl"),
    "accuracy": ("validation", "accuracy"),
    "validation_loss": ("validation", "loss"),
    "loss": ("train", "loss"),
    "lr": ("train", "lr"),
    "grad_norm": ("train", "grad_norm"),
}
_MOST_AT_ONCE = 256 * MIB
# Number of bytes before the read position that must be unchanged; otherwise the file is read from its start.
_CHECKED = 256
# Name of a measurement -> (file, length of a record, unit of the value). The file has one record of float64
# numbers per step, and the first number of a record is the value.
_STEP_FILES = {"step_time": ("step_times.bin", 4, 1.0), "memory": ("step_memory.bin", 1, 2.0**30)}
_LARGEST = 1e15  # a larger number in these files means that the file is damaged

Column = dict[int, float]  # step -> value


class RunMetrics:
    """The measurements of one run, by name and step. `update()` reads what was appended to its files."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.problem = ""  # why the rest of metrics.jsonl cannot be read; "" if it can
        self._metrics = _Appended("metrics.jsonl")
        self._steps = {name: _Appended(file) for name, (file, _length, _unit) in _STEP_FILES.items()}

    def update(self, reader: RunReader, *, costs: bool = True) -> None:
        """Read the new rows of the run's files; a file whose old rows have changed is read from its start.

        costs: also read step times and memory
        """
        try:
            content, from_start = self._metrics.read(reader)
            if from_start:
                self.columns = {name: c for name, c in self.columns.items() if name in _STEP_FILES}
                self.problem = ""
            rows, rest = content.rpartition(b"\n")[::2]
            self._metrics.give_back(rest)
            self._add_rows(rows + b"\n" if rows else b"", str(reader.path / "metrics.jsonl"))
        except (OelmError, OSError) as error:
            self.problem = str(error)
        for name in _STEP_FILES if costs else ():
            try:
                self._add_steps(name, reader)
            except (OelmError, OSError):
                self.columns.pop(name, None)

    def _add_rows(self, lines: bytes, where: str) -> None:
        for number, line in enumerate(parse_json_lines(io.BytesIO(lines), f"{where}, new lines"), 1):
            row = MetricsRow.from_json(line, f"{where}, new line {number}")
            for name, (kind, field) in _FIELDS.items():
                if row.kind == kind:
                    self._add(name, row.step, row.values.get(field))
            if row.kind == "attention":
                self._add("entropy", row.step, _mean_entropy(row.values))

    def _add(self, name: str, step: int, value: Any) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            self.columns.setdefault(name, {})[step] = float(value)

    def _add_steps(self, name: str, reader: RunReader) -> None:
        _file, length, unit = _STEP_FILES[name]
        content, from_start = self._steps[name].read(reader)
        if from_start:
            self.columns.pop(name, None)
        size = 8 * length
        whole = len(content) // size * size
        self._steps[name].give_back(content[whole:])
        first = (self._steps[name].position - whole) // size
        for step, value in enumerate(np.frombuffer(content[:whole], "<f8")[::length], first + 1):
            if 0 < value < _LARGEST:  # a negative time marks a warm-up step, 0 a step that was not measured
                self._add(name, step, float(value) / unit)


class _Appended:
    """A growing file of a run; remembers up to which position it was read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.position = 0
        self._before = b""  # the last bytes before `position`, to notice if the file was rewritten

    def read(self, reader: RunReader) -> tuple[bytes, bool]:
        """Return (bytes, from_start): what was appended to the file since the last call.

        If old bytes of the file have changed, return the whole file and from_start=True.
        """
        try:
            file = reader.open(self.name)
        except FileNotFoundError:
            changed = self.position > 0
            self.position, self._before = 0, b""
            return b"", changed
        with file:
            if not self._is_continued(file):
                self.position, self._before = 0, b""
            start = self.position
            file.seek(start)
            content = file.read(_MOST_AT_ONCE)
        self.position += len(content)
        self._before = (self._before + content)[-_CHECKED - MIB :]
        return content, start == 0

    def give_back(self, rest: bytes) -> None:
        """Let the next `read()` return `rest` again, because it is not a complete row yet."""
        self.position -= len(rest)
        self._before = self._before[: len(self._before) - len(rest)][-_CHECKED:]

    def _is_continued(self, file: IO[bytes]) -> bool:
        file.seek(self.position - len(self._before))
        return file.read(len(self._before)) == self._before


def _mean_entropy(values: Mapping[str, Any]) -> float | None:
    """Return the attention entropy in a row of metrics.jsonl, averaged over layers; None if it has none."""
    layers = values.get("layers")
    found = (
        [entry.get("entropy") for entry in layers if isinstance(entry, dict)]
        if isinstance(layers, list)
        else []
    )
    numbers = [float(x) for x in found if isinstance(x, int | float) and math.isfinite(x)]
    return sum(numbers) / len(numbers) if numbers else None
