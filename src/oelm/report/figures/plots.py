"""Draw figures for a Markdown report and for a paper. The HTML report and the board have their own charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.costs import StepRatio
from oelm.analysis.verdict import SCENARIO_A, SCENARIO_B, TARGET
from oelm.report import numbers
from oelm.report.figures import charts
from oelm.report.figures.drawing import ArmStyles, Drawing, legend_below, new_canvas
from oelm.report.sentences import group_title
from oelm.report.summary import by_group
from oelm.report.translate import Translator

MIN_BAND = 3  # fewest seeds with which an interval is drawn; with two, it is wider than any plot
MAX_NAME = 30  # characters; a longer name is cut in a figure
ROW_INCHES = 0.2  # height of a row of a forest plot, so that 40 rows fit on a page
MAX_ROWS = 40  # maximum number of rows in one forest plot; further rows go to another plot

_Row = tuple[str, dict[str, Any], float, tuple[float, float] | None]  # label, styles, value, interval


def all_drawings(analysis: Analysis, _: Translator) -> Iterator[Drawing]:
    """Yield the figures for a paper: forest plots of all arms against their baselines, then curves."""
    baseline = analysis.comparisons.of("baseline")
    styles = ArmStyles([a.name for a in analysis.arms])
    for i, rows in enumerate(_forests([c for c in baseline if c.effect is not None])):
        yield changes(rows, styles, _, name=f"changes-{i}")
    for i, group in enumerate(by_group(baseline).values()):
        for j, arms in enumerate(charts.in_parts(group)):
            drawn = curves(arms, _, group_title(group[0], _), name=f"curves-{i}-{j}")
            if drawn is not None:
                yield drawn


def _forests(comparisons: Sequence[Comparison]) -> Iterator[Sequence[Comparison]]:
    """Yield the comparisons for each forest plot: at most MAX_ROWS of the same study and metric."""
    for _key, found in groupby(comparisons, key=lambda c: (c.arm.config.study, c.metric)):
        rows = list(found)
        for start in range(0, len(rows), MAX_ROWS):
            yield rows[start : start + MAX_ROWS]


def changes(comparisons: Sequence[Comparison], styles: ArmStyles, _: Translator, *, name: str) -> Drawing:
    """Draw a forest plot of changes against the baseline: perplexity in per cent, or accuracy in points."""
    perplexity = comparisons[0].metric == "ppl"
    in_unit = numbers.percent if perplexity else float
    rows: list[_Row] = []
    for c in comparisons:
        assert c.effect is not None
        value = in_unit(c.effect.value)
        interval = c.effect.interval and (in_unit(c.effect.interval[0]), in_unit(c.effect.interval[1]))
        rows.append((f"{_short(c.arm.name)} · {_short(c.dataset)}", styles.of(c.arm.name), value, interval))
    canvas, axes = new_canvas(0.8 + ROW_INCHES * len(rows))
    _draw_forest(axes, rows)
    if perplexity:
        _draw_margin(axes, 100 * TARGET, "5 %")
        axes.set_xlabel(_("change of perplexity, %"))
        caption = _(
            "Change of perplexity against the baseline; lower is better. Dot: mean over seeds; bar: 95 % "
            "confidence interval; dashed: the 5 % target. A hollow dot has one seed and no interval."
        )
        return Drawing(name, canvas, caption)
    axes.set_xlabel(_("change of accuracy, percentage points"))
    if not any(c.scenario for c in comparisons):
        caption = _(
            "Change of accuracy against the baseline; higher is better. Dot: mean over seeds; bar: 95 % "
            "confidence interval. A hollow dot has one seed and no interval."
        )
        return Drawing(name, canvas, caption)
    _draw_margin(axes, SCENARIO_A, "C | A")
    _draw_margin(axes, SCENARIO_B, "B | C")
    caption = _(
        "Change of accuracy against the baseline; higher is better. Dot: mean over seeds; bar: 95 % "
        "confidence interval; dashed: the borders between scenarios A, C and B. A hollow dot has one seed "
        "and no interval."
    )
    return Drawing(name, canvas, caption)


def step_times(benchmarks: Sequence[StepRatio], styles: ArmStyles, _: Translator) -> Drawing:
    """Draw how much step time and peak memory differ from the baseline."""
    canvas, (left, right) = new_canvas(0.8 + ROW_INCHES * len(benchmarks), 2, sharey=True)
    times: list[_Row] = []
    memory: list[_Row] = []
    for b in benchmarks:
        label = f"{_short(b.method)} · {_short(b.model)} · {_short(b.source.stem)}"
        style = styles.of(b.method)
        low, high = (100 * (bound - 1) for bound in b.interval)
        times.append((label, style, 100 * (b.ratio - 1), (low, high)))
        peak = math.nan if b.memory_ratio is None else 100 * (b.memory_ratio - 1)
        memory.append((label, style, peak, None))
    _draw_forest(right, memory)
    _draw_forest(left, times)
    left.set_xlabel(_("change of step time, %"))
    right.set_xlabel(_("change of peak memory, %"))
    caption = _(
        "Step time and peak memory against the baseline; lower is better. Each benchmark measures all "
        "methods several times, in a random order. Bar: 95 % confidence interval of the step time."
    )
    return Drawing("step-time", canvas, caption)


def _draw_forest(axes: Any, rows: Sequence[_Row]) -> None:
    """Draw each row as a dot with its interval as a bar; the dot is hollow if there is no interval."""
    for y, (_label, style, value, interval) in enumerate(rows):
        colour, face = style["color"], "none"
        if interval is not None:
            axes.plot(interval, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            face = colour
        point = {"marker": style["marker"], "markersize": 4.5, "markerfacecolor": face}
        axes.plot([value], [y], color=colour, linestyle="", **point)
    axes.axvline(0, color=axes.spines["left"].get_edgecolor(), linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label for label, *_rest in rows])
    axes.set_ylim(len(rows) - 0.4, -0.9)
    axes.grid(axis="x")


def _draw_margin(axes: Any, x: float, text: str) -> None:
    axes.axvline(x, color=axes.spines["left"].get_edgecolor(), linewidth=1.2, linestyle="--")
    place = {"xycoords": ("data", "axes fraction"), "xytext": (3, -2), "textcoords": "offset points"}
    axes.annotate(text, (x, 1), ha="left", va="top", **place)


def curves(arms: Sequence[Arm], _: Translator, title: str, *, name: str) -> Drawing | None:
    """Draw the mean validation loss over seeds and its 95 % confidence interval at each step.

    Returns None if no run has a validation loss.
    """
    found = charts.curves(arms, ("validation_loss",), _)
    if not found:
        return None
    [data] = found
    styles = ArmStyles([a.name for a in arms])
    steps = np.array(data["steps"])
    canvas, axes = new_canvas(2.6)
    for line in data["lines"]:
        mean, low, high = (np.array(line[part], dtype=float) for part in ("mean", "low", "high"))
        known = np.isfinite(mean)
        style = styles.of(line["name"]) | {"markevery": max(1, int(known.sum()) // 8), "markersize": 4}
        axes.plot(steps[known], mean[known], label=_short(line["name"]), **style)
        band = known & (np.array(line["n"]) >= MIN_BAND)
        axes.fill_between(steps[band], low[band], high[band], color=style["color"], alpha=0.15, lw=0)
    axes.set_xlabel(_("step"))
    axes.set_ylabel(data["label"])
    axes.grid()
    legend_below(canvas, axes)
    caption = _(
        "Validation loss, {title}. Line: mean over seeds; band: 95 % confidence interval of the mean, from "
        "three seeds on.",
        title=title,
    )
    return Drawing(name, canvas, caption)


def _short(name: str) -> str:
    """Return the name, cut to MAX_NAME characters so that it leaves room for the plot."""
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
