"""Prepare the curves of a chart: for each arm, its seeds, their mean, and its confidence interval.

The result is plain JSON. The script static/charts.js draws it, on the board and in the HTML report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from oelm.analysis.arms import Arm
from oelm.analysis.load import DIVERGED
from oelm.analysis.statistics.intervals import LEVEL, t_quantile
from oelm.printable import printable
from oelm.report.board.metrics import MEASUREMENTS, Column
from oelm.report.board.snapshot import Board
from oelm.report.translate import Translator
from oelm.runs.scan import RunInfo

MAX_POINTS = (
    400  # maximum number of points of a curve; in longer curves, each point is the mean of several steps
)


def arm_curves(board: Board, arms: Sequence[Arm], measurement: str, _: Translator) -> dict[str, Any]:
    """Return the chart of one measurement with one curve per arm; the mean leaves out diverged runs."""
    lines = []
    for arm in arms:
        seeds = {}
        for run in arm.runs:
            key = run.path.relative_to(board.root).as_posix()
            if key in board.runs:
                column = board.metrics(key).columns.get(measurement, {})
                seeds[key] = Seed(_("seed {seed}", seed=run.seed), column, run.state == DIVERGED)
        lines.append((arm.name if arm.name != arm.id else arm.id, seeds))
    return chart(lines, measurement, _)


def run_curves(board: Board, runs: Mapping[str, RunInfo], measurement: str, _: Translator) -> dict[str, Any]:
    """Return the chart of one measurement with one curve per run."""
    lines = [
        (run.name, {key: Seed(run.name, board.metrics(key).columns.get(measurement, {}), False)})
        for key, run in runs.items()
    ]
    return chart(lines, measurement, _)


def measurements_of(board: Board, keys: Iterable[str]) -> list[str]:
    """Return the names of the measurements that at least one of the runs has."""
    known = {name for key in keys for name in board.metrics(key).columns}
    return [name for name in MEASUREMENTS if name in known]


class Seed:
    """One run of an arm: its name, its values of one measurement (`column`), and whether it diverged."""

    def __init__(self, name: str, column: Column, diverged: bool) -> None:
        self.name, self.column, self.diverged = name, column, diverged


def chart(lines: Sequence[tuple[str, Mapping[str, Seed]]], measurement: str, _: Translator) -> dict[str, Any]:
    """Return the chart of one measurement as JSON data.

    lines: one (name, seeds) per arm; `seeds` is {path of a run: the `Seed` with its values}
    """
    columns = [seed.column for _name, seeds in lines for seed in seeds.values()]
    width = _part_width(columns)
    steps = sorted({step for column in columns for step in _thinned(column, width)})
    return {
        "measurement": measurement,
        "label": _(MEASUREMENTS[measurement]),
        "steps": steps,
        "lines": [_line(name, seeds, steps, width, _) for name, seeds in lines],
        "words": {
            "step": _("step"),
            "at": _("step {n}", n="{n}"),
            "mean": _("mean"),
            "interval": _("95 % interval"),
            "table": _("The same numbers as a table"),
            "empty": _("No values yet."),
            "hint": _("Arrow keys move along the steps."),
            "diverged": _("diverged"),
        },
    }


def _line(
    name: str, seeds: Mapping[str, Seed], steps: Sequence[int], width: int, _: Translator
) -> dict[str, Any]:
    """Return the curve of one arm: at each step, the mean of the seeds that have a value, with its interval.

    The interval is a confidence interval with Student's t.

    width: how many steps are averaged into one point
    """
    table = {key: _thinned(seed.column, width) for key, seed in seeds.items()}
    counted = [table[key] for key, seed in seeds.items() if not seed.diverged]
    values = np.array([[column.get(step, math.nan) for step in steps] for column in counted])
    values = values.reshape(len(counted), len(steps))
    n = np.isfinite(values).sum(axis=0)
    mean, half = np.full(len(steps), math.nan), np.full(len(steps), math.nan)
    some, several = n > 0, n > 1
    mean[some] = np.nansum(values[:, some], axis=0) / n[some]
    deviation = np.nansum((values - mean) ** 2, axis=0)[several] / (n[several] - 1)
    factor = np.array([t_quantile(LEVEL, int(count) - 1) for count in n[several]])
    half[several] = factor * np.sqrt(deviation / n[several])
    return {
        "name": printable(name),
        "n": [int(count) for count in n],
        "mean": _numbers(mean),
        "low": _numbers(mean - half),
        "high": _numbers(mean + half),
        "seeds": [
            {
                "name": printable(seed.name),
                "run": key,
                "diverged": seed.diverged,
                "values": [table[key].get(step) for step in steps],
            }
            for key, seed in seeds.items()
            if table[key]
        ],
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _part_width(columns: Iterable[Column]) -> int:
    """Return how many steps to average into one point, so that no curve has more than MAX_POINTS points."""
    most = max((len(column) for column in columns), default=0)
    if most <= MAX_POINTS:
        return 1
    last = max(max(column) for column in columns if column)
    return math.ceil(last / MAX_POINTS)


def _thinned(column: Column, width: int) -> Column:
    """Return a shorter curve: the mean over every `width` steps, placed at the last of these steps."""
    if width == 1:
        return column
    parts: dict[int, list[float]] = {}
    for step, value in column.items():
        parts.setdefault(-(-step // width) * width, []).append(value)
    return {step: sum(values) / len(values) for step, values in parts.items()}
