"""Numbers as readers want them: the sign of a change always shown, an interval never without its n."""

from __future__ import annotations

import math

from oelm.analysis.messages import Message, say
from oelm.analysis.statistics import Estimate, is_wide
from oelm.units import bytes_text

MINUS = "−"


def signed(value: float, digits: int = 1) -> str:
    """
    >>> signed(-1.84, 2), signed(0.04), signed(-0.01)
    ('−1.84', '0.0', '0.0')
    """
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return f"{0:.{digits}f}"
    return text.replace("-", MINUS)


def change(log_ratio: float) -> str:
    """A log ratio as a change in per cent."""
    percent = 100 * math.expm1(log_ratio)
    return f"{signed(percent, 2 if abs(percent) < 1 else 1)} %"


def points(value: float) -> str:
    return signed(value, 2 if abs(value) < 1 else 1)


def score(value: float, metric: str) -> str:
    return (
        f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.3f}" if value < 100 else f"{value:.1f}"
    )


def effect(estimate: Estimate, metric: str) -> str:
    return change(estimate.value) if metric == "ppl" else points(estimate.value)


def interval(estimate: Estimate, metric: str) -> Message:
    """The interval, or why it says nothing: "0.00 to 0.00" and "-151 to +130 points" are no information."""
    if estimate.interval is None:
        return say("interval.none")
    low, high = estimate.interval
    if low == high:
        return say("interval.zero")
    if is_wide(estimate, points=metric == "accuracy"):
        return say("interval.wide")
    show = change if metric == "ppl" else points
    return say("interval", low=show(low), high=show(high))


def seeds(estimate: Estimate) -> str:
    """The n of an estimate; both arms' when they are not paired."""
    return f"{estimate.n} / {estimate.n_reference}" if estimate.way == "Welch" else str(estimate.n)


def count(value: int) -> str:
    return f"{value:,}"


def size(bytes_: float | None) -> str:
    return "–" if bytes_ is None else bytes_text(bytes_)


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"
