"""Prepare forest plots, with one question per row and a common axis.

A row shows the change of the score against the reference, its confidence interval, the margin, the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from oelm.analysis.messages import Message
from oelm.analysis.statistics.effects import measure
from oelm.analysis.statistics.intervals import Estimate, is_wide
from oelm.report import numbers
from oelm.report.board.questions import ShownQuestion
from oelm.report.document import Tone
from oelm.report.translate import Translator

_MOST_PERCENT = 300.0  # maximum end of the axis; larger changes are drawn at the end
CAPTIONS = {
    "ppl": Message("Change of perplexity against the reference; lower is better."),
    "accuracy": Message("Change of accuracy against the reference; higher is better."),
}


@dataclass(frozen=True)
class Bar:
    """A confidence interval on the axis of a forest plot; positions are in per cent of the axis length."""

    value: float
    low: float | None
    high: float | None
    margins: tuple[float, ...]
    zero: float


@dataclass(frozen=True)
class ForestRow:
    """One row of a forest plot: a question, or (in `by_seeds()`) its estimate from the first n seeds."""

    title: str
    verdict: str
    tone: Tone
    change: str
    interval: str
    n: str
    note: str
    bar: Bar | None


@dataclass(frozen=True)
class Forest:
    """A forest plot. Its axis is the change as a percentage of the reference's score."""

    rows: tuple[ForestRow, ...]
    ticks: tuple[tuple[float, str], ...]  # (position on the axis, label)


def forest(questions: Sequence[ShownQuestion], _: Translator) -> Forest:
    """Return the forest plot of questions whose comparisons all have the same metric."""
    axis = _Axis([(_ratio(q), q.margins) for q in questions])
    rows = [
        _row(_(q.title), _ratio(q), axis, q.margins, _(q.answer), q.tone, _(q.note) if q.note else "", _)
        for q in questions
    ]
    return Forest(tuple(rows), axis.ticks())


def by_seeds(question: ShownQuestion, _: Translator) -> Forest | None:
    """Return a forest plot for one question; row n shows the confidence interval from the first n seeds.

    Returns None if the two arms have fewer than two seeds in common.
    """
    c = question.comparison
    shared = sorted(c.arm.scores.keys() & c.reference.scores.keys()) if c else []
    if c is None or c.ratio is None or len(shared) < 2:
        return None
    found = []
    for n in range(1, len(shared) + 1):
        arm, reference = (a.with_seeds(shared[:n]) for a in (c.arm, c.reference))
        found.append(measure(arm, reference, c.ratio.level).ratio)
    axis = _Axis([(ratio, question.margins) for ratio in found])
    rows = [_row(f"n = {ratio.n}", ratio, axis, question.margins, "", "", "", _) for ratio in found]
    return Forest(tuple(rows), axis.ticks())


def _ratio(question: ShownQuestion) -> Estimate | None:
    return question.comparison.ratio if question.comparison else None


def _row(
    title: str,
    ratio: Estimate | None,
    axis: _Axis,
    margins: Sequence[float],
    verdict: str,
    tone: Tone,
    note: str,
    _: Translator,
) -> ForestRow:
    if ratio is None:
        return ForestRow(title, verdict, tone, "–", "–", "–", note, None)
    return ForestRow(
        title,
        verdict,
        tone,
        numbers.change(ratio.value),
        _(numbers.interval(ratio, "ppl")),  # "ppl" means in per cent, which this plot uses for accuracy too
        numbers.seeds(ratio),
        note,
        axis.bar(ratio, margins),
    )


class _Axis:
    """The common axis of the rows: the change in per cent. It includes 0 and all margins."""

    def __init__(self, shown: Iterable[tuple[Estimate | None, Sequence[float]]]) -> None:
        values = [0.0]
        for ratio, margins in shown:
            values += margins
            if ratio is not None:
                values += [_percent(x) for x in (ratio.value, *_informative(ratio))]
        low, high = max(min(values), -100.0), min(max(values), _MOST_PERCENT)
        room = 0.06 * (high - low or 1.0)
        self.low, self.high = low - room, high + room

    def at(self, percent: float) -> float:
        """Return where on the axis the change `percent` is drawn, from 0 (left end) to 100 (right end)."""
        place = 100 * (percent - self.low) / (self.high - self.low)
        return round(min(100.0, max(0.0, place)), 2)

    def bar(self, ratio: Estimate, margins: Sequence[float]) -> Bar:
        low, high = (self.at(_percent(x)) for x in ratio.interval) if ratio.interval else (None, None)
        at_margins = tuple(self.at(margin) for margin in margins)
        return Bar(self.at(_percent(ratio.value)), low, high, at_margins, self.at(0))

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Return (position, label) of a few round values on the axis, including 0."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        step *= next(k for k in (1, 2, 5, 10) if (self.high - self.low) / (step * k) <= 5)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return tuple(
            (self.at(i * step), f"{numbers.signed(i * step, 0 if step >= 1 else 2)} %")
            for i in range(first, last + 1)
        )


def _informative(ratio: Estimate) -> Iterator[float]:
    """Yield the two ends of the confidence interval; nothing if it is too wide to be informative."""
    if ratio.interval and not is_wide(ratio, points=False):
        yield from ratio.interval


def _percent(log_ratio: float) -> float:
    return numbers.percent(min(log_ratio, 5.0))
