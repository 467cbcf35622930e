"""Format numbers as text. A change always has its sign; a very wide interval is not shown."""

from __future__ import annotations

import math

from oelm.analysis.messages import Message
from oelm.analysis.statistics.intervals import Estimate, is_wide
from oelm.units import bytes_text

MINUS = "−"


def signed(value: float, digits: int = 1) -> str:
    """Return a number with its sign, and zero without one.

    >>> signed(-1.84, 2), signed(0.04), signed(-0.01)
    ('−1.84', '0.0', '0.0')
    """
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return f"{0:.{digits}f}"
    return text.replace("-", MINUS)


def percent(log_ratio: float) -> float:
    """Return a log ratio as a change in per cent."""
    return 100 * math.expm1(log_ratio)


def change(log_ratio: float) -> str:
    """Return a log ratio as the text of a change in per cent.

    >>> change(math.log(1.08)), change(math.log(0.998))
    ('+8.0 %', '−0.20 %')
    """
    return f"{points(percent(log_ratio))} %"


def points(value: float) -> str:
    """Return a difference in percentage points, with two decimals if its size is below 1, otherwise one."""
    return signed(value, 2 if abs(value) < 1 else 1)


def score(value: float, metric: str) -> str:
    """Return a test score as text: an accuracy in per cent, or a perplexity."""
    if metric == "accuracy":
        return f"{100 * value:.2f} %"
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def effect(estimate: Estimate, metric: str) -> str:
    """Return the change of perplexity in per cent, or of accuracy in percentage points."""
    return change(estimate.value) if metric == "ppl" else points(estimate.value)


def interval(estimate: Estimate, metric: str) -> Message:
    """Return the confidence interval as text, or the reason why none is shown."""
    if estimate.interval is None:
        return Message("none")
    low, high = estimate.interval
    if low == high:
        return Message("none (all seeds give the same result)")
    if is_wide(estimate, points=metric == "accuracy"):
        return Message("too wide to be informative")
    show = change if metric == "ppl" else points
    return Message("{low} to {high}", low=show(low), high=show(high))


def seeds(estimate: Estimate) -> str:
    """Return the number of paired seeds, or "n / m" with the numbers of both arms if they are not paired."""
    return f"{estimate.n} / {estimate.n_reference}" if estimate.interval_kind == "Welch" else str(estimate.n)


def size(count: float | None) -> str:
    return "–" if count is None else bytes_text(count)


def share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "–"
