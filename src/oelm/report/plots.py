"""Draw the figures of the report from comparisons, benchmarks and run folders."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib import colormaps

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.costs import StepRatio
from oelm.analysis.load import LoadedRun
from oelm.analysis.messages import Message
from oelm.analysis.statistics import LEVEL, t_quantile
from oelm.analysis.verdict import SCENARIO_A, SCENARIO_B, TARGET
from oelm.report.document import Figure
from oelm.report.sections import MAX_CURVE_GROUPS
from oelm.report.sentences import group_title
from oelm.report.summary import by_group
from oelm.report.svg import COLOURS, INK, ArmStyles, canvas, legend_below, plot_style, to_svg
from oelm.report.translate import Translator
from oelm.runs.schema import MetricsRow

# For each panel of the attention figure, the fields of a layer in metrics.jsonl that it averages. The fields
# of orthogonality are missing for frozen Q/K, because the value cannot change.
ATTENTION = {
    "entropy": ("entropy",),
    "logit_scale": ("logit_scale",),
    "orthogonality": ("off_orthogonal_q", "off_orthogonal_k"),
}
PANEL_TITLES = {
    "entropy": Message("entropy of attention, nats"),
    "logit_scale": Message("scale of logits"),
    "orthogonality": Message("distance from orthogonal"),
}
MIN_BAND = 3  # seeds; the t interval of two seeds is wider than any plot
MAX_NAME = 30  # characters; a longer name is cut in a figure
MAX_ROWS = 40  # rows of one forest plot; more rows go to a further plot
MAX_ARMS = len(COLOURS)  # most arms in one plot of curves, so that each arm has its own colour

_Row = tuple[str, dict[str, Any], float, tuple[float, float] | None]  # label, styles, value, interval


def all_figures(analysis: Analysis, _: Translator) -> dict[str, list[Figure]]:
    """Return the figures of each section, by the anchor of the section and in reading order."""
    with plot_style():
        return _all_figures(analysis, _)


def _all_figures(analysis: Analysis, _: Translator) -> dict[str, list[Figure]]:
    baseline = analysis.comparisons.of("baseline")
    styles = ArmStyles([a.name for a in analysis.arms])
    figures: dict[str, list[Figure]] = {"comparisons": [], "training": [], "costs": []}
    for i, rows in enumerate(_forests([c for c in baseline if c.effect is not None])):
        figures["comparisons"].append(changes(rows, styles, _, name=f"changes-{i}"))
    if analysis.benchmarks:
        figures["costs"].append(step_times(analysis.benchmarks, styles, _))
    for i, group in enumerate(list(by_group(baseline).values())[:MAX_CURVE_GROUPS]):
        title = group_title(group[0], _)
        for j, arms in enumerate(_parts(group)):
            part, part_styles = f"{i}-{j}", ArmStyles([a.name for a in arms])
            drawn = (
                curves(arms, part_styles, _, title, name=f"curves-{part}"),
                attention(arms, part_styles, _, title, name=f"attention-{part}"),
                heads(arms, _, title, name=f"heads-{part}"),
            )
            figures["training"] += [figure for figure in drawn if figure is not None]
    return figures


def _parts(group: Sequence[Comparison]) -> Iterator[list[Arm]]:
    """Yield the arms of a group in parts of at most MAX_ARMS, one plot each.

    Each part starts with a reference, followed by the arms that are compared with it. An arm and its control
    are in the same part.
    """
    references = {c.reference.id: c.reference for c in group}
    for reference in references.values():
        left = {c.arm.id: c.arm for c in group if c.reference.id == reference.id}
        part = [reference]
        while left:
            arm = left.pop(next(iter(left)))
            paired = [a.id for a in left.values() if arm.id == _control(a) or a.id == _control(arm)]
            together = [arm, *(left.pop(other) for other in paired[:1])]
            if len(part) > 1 and len(part) + len(together) > MAX_ARMS:
                yield part
                part = [reference]
            part += together
        yield part


def _control(arm: Arm) -> str:
    return arm.config.compare.control


def _forests(comparisons: Sequence[Comparison]) -> Iterator[Sequence[Comparison]]:
    """Yield the comparisons of each forest plot: at most MAX_ROWS of the same study and metric."""
    for _key, found in groupby(comparisons, key=lambda c: (c.arm.config.study, c.metric)):
        rows = list(found)
        for start in range(0, len(rows), MAX_ROWS):
            yield rows[start : start + MAX_ROWS]


def changes(comparisons: Sequence[Comparison], styles: ArmStyles, _: Translator, *, name: str) -> Figure:
    """Draw a forest plot of changes against the baseline: perplexity in per cent, or accuracy in points."""
    perplexity = comparisons[0].metric == "ppl"
    rows: list[_Row] = []
    for c in comparisons:
        assert c.effect is not None
        low_high = c.effect.interval
        if perplexity:
            value = _percent(c.effect.value)
            interval = None if low_high is None else (_percent(low_high[0]), _percent(low_high[1]))
        else:
            value, interval = c.effect.value, low_high
        rows.append((f"{_short(c.arm.name)} · {_short(c.dataset)}", styles.of(c.arm.name), value, interval))
    figure, axes = canvas(name, 1.1 + 0.3 * len(rows))
    _draw_forest(axes, rows)
    if perplexity:
        _draw_margin(axes, 100 * TARGET, "5 %")
        axes.set_xlabel(_("change of perplexity, %"))
        return _figure(
            name,
            figure,
            _(
                "Change of perplexity against the baseline; lower is better. Dot: mean over seeds; bar: 95 % "
                "interval; dashed: the 5 % target. A hollow dot has one seed and no interval."
            ),
        )
    axes.set_xlabel(_("change of accuracy, percentage points"))
    if not any(c.scenario for c in comparisons):
        return _figure(
            name,
            figure,
            _(
                "Change of accuracy against the baseline; higher is better. Dot: mean over seeds; bar: 95 % "
                "interval. A hollow dot has one seed and no interval."
            ),
        )
    _draw_margin(axes, SCENARIO_A, "C | A")
    _draw_margin(axes, SCENARIO_B, "B | C")
    return _figure(
        name,
        figure,
        _(
            "Change of accuracy against the baseline; higher is better. Dot: mean over seeds; bar: 95 % "
            "interval; dashed: the borders between scenarios A, C and B. A hollow dot has one seed and no "
            "interval."
        ),
    )


def step_times(benchmarks: Sequence[StepRatio], styles: ArmStyles, _: Translator) -> Figure:
    """Draw step time and peak memory against the baseline, from interleaved benchmarks."""
    figure, (left, right) = canvas("step-time", 1.1 + 0.3 * len(benchmarks), 2, sharey=True)
    times: list[_Row] = []
    memory: list[_Row] = []
    for b in benchmarks:
        label, style = f"{_short(b.method)} · {_short(b.model)}", styles.of(b.method)
        low, high = (100 * (bound - 1) for bound in b.interval)
        times.append((label, style, 100 * (b.ratio - 1), (low, high)))
        peak = math.nan if b.memory_ratio is None else 100 * (b.memory_ratio - 1)
        memory.append((label, style, peak, None))
    _draw_forest(right, memory)
    _draw_forest(left, times)
    left.set_xlabel(_("change of step time, %"))
    right.set_xlabel(_("change of peak memory, %"))
    caption = _(
        "Step time and peak memory against the baseline in interleaved benchmarks; lower is better. Bar: "
        "95 % interval. Peak memory is measured once."
    )
    return _figure("step-time", figure, caption)


def _draw_forest(axes: Any, rows: Sequence[_Row]) -> None:
    """Draw each row as a dot with its interval as a bar; the dot is hollow if there is no interval."""
    for y, (_label, style, value, interval) in enumerate(rows):
        colour, face = style["color"], "none"
        if interval is not None:
            axes.plot(interval, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            face = colour
        axes.plot([value], [y], marker=style["marker"], color=colour, markerfacecolor=face, linestyle="")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [label for label, *_rest in rows])
    axes.set_ylim(len(rows) - 0.4, -0.9)
    axes.grid(axis="x")


def _draw_margin(axes: Any, x: float, text: str) -> None:
    axes.axvline(x, color=INK, linewidth=1.2, linestyle="--")
    place = {"xycoords": ("data", "axes fraction"), "xytext": (3, -2), "textcoords": "offset points"}
    axes.annotate(text, (x, 1), ha="left", va="top", color=INK, **place)


def curves(arms: Iterable[Arm], styles: ArmStyles, _: Translator, title: str, *, name: str) -> Figure | None:
    """Draw the validation loss over steps, as mean and interval over seeds; None if there are no curves."""
    figure, axes = canvas(name, 3.0)
    drawn = False
    for arm in arms:
        steps, values = _series([_column(r, "validation", "loss") for r in arm.finished])
        if len(steps) < 2:
            continue
        style = styles.of(arm.name) | {"markevery": max(1, len(steps) // 8), "markersize": 4}
        axes.plot(steps, values.mean(axis=0), label=_short(arm.name), **style)
        if len(values) >= MIN_BAND:
            mean, se = values.mean(axis=0), values.std(axis=0, ddof=1) / math.sqrt(len(values))
            half = t_quantile(LEVEL, len(values) - 1) * se
            axes.fill_between(steps, mean - half, mean + half, color=style["color"], alpha=0.15, lw=0)
        drawn = True
    if not drawn:
        return None
    axes.set_xlabel(_("step"))
    axes.set_ylabel(_("validation loss"))
    axes.grid()
    legend_below(figure, axes)
    caption = _(
        "Validation loss, {title}. Line: mean over seeds; band: 95 % confidence interval of the mean, from "
        "three seeds on.",
        title=title,
    )
    return _figure(name, figure, caption)


def attention(
    arms: Iterable[Arm], styles: ArmStyles, _: Translator, title: str, *, name: str
) -> Figure | None:
    """Draw attention entropy, logit scale and distance from orthogonality over steps; None without data.

    Each value is the mean over heads, layers and seeds.
    """
    found: dict[str, list[tuple[str, Any, Any]]] = defaultdict(list)
    for arm in arms:
        for panel in ATTENTION:
            steps, values = _series([_attention_mean(r, panel) for r in arm.finished])
            if len(steps):
                found[panel].append((arm.name, steps, values.mean(axis=0)))
    if not found:
        return None
    panels = [panel for panel in ATTENTION if panel in found]
    figure, all_axes = canvas(name, 2.6, len(panels), squeeze=False)
    for axes, panel in zip(all_axes[0], panels, strict=True):
        for label, steps, values in found[panel]:
            axes.plot(steps, values, label=_short(label), markersize=4, **styles.of(label))
        axes.set_title(_(PANEL_TITLES[panel]))
        axes.set_xlabel(_("step"))
        axes.grid()
    legend_below(figure, all_axes[0][0])
    caption = _(
        "Attention during training, {title}: mean over heads, layers and seeds of each arm.", title=title
    )
    return _figure(name, figure, caption)


def heads(arms: Iterable[Arm], _: Translator, title: str, *, name: str) -> Figure | None:
    """Draw the entropy of each attention head at the end of training, as a map of layers and heads."""
    found = ((a.name, _last_entropy(a.finished[0])) for a in arms if a.finished)
    maps = [(arm, grid) for arm, grid in found if grid is not None]
    if not maps:
        return None
    rows = math.ceil(len(maps) / 4)
    figure, axes = canvas(name, 2.6 * rows, math.ceil(len(maps) / rows), rows=rows, squeeze=False)
    panels = list(axes.flat)
    for unused in panels[len(maps) :]:
        unused.set_visible(False)
    highest = max(float(np.nanmax(grid)) for arm, grid in maps)
    colours = colormaps["cividis"].resampled(16)
    image: Any = None
    for panel, (arm, grid) in zip(panels, maps, strict=False):
        image = panel.pcolormesh(grid, cmap=colours, vmin=0, vmax=highest, edgecolors="none")
        panel.set_title(_two_lines(arm))
        panel.set_xlabel(_("head"))
        panel.set_xticks(np.arange(grid.shape[1]) + 0.5, [str(i + 1) for i in range(grid.shape[1])])
        panel.set_yticks(np.arange(grid.shape[0]) + 0.5, [str(i + 1) for i in range(grid.shape[0])])
    for first in axes[:, 0]:
        first.set_ylabel(_("layer"))
    bar = figure.colorbar(image, ax=panels, shrink=0.9)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_visible(False)
    caption = _(
        "Entropy of attention per layer and head at the end of training, {title} (first seed).", title=title
    )
    return _figure(name, figure, caption)


def _figure(name: str, figure: Any, caption: str) -> Figure:
    return Figure(name, to_svg(figure, caption), caption)


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _short(name: str) -> str:
    """Return the name, cut to MAX_NAME characters so that it leaves room for the plot."""
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _two_lines(name: str) -> str:
    """Return a name; a long one has a line break at the hyphen nearest to its middle."""
    name = _short(name)
    hyphens = [i for i, c in enumerate(name) if c == "-"]
    if len(name) <= 12 or not hyphens:
        return name
    at = min(hyphens, key=lambda i: abs(i - len(name) / 2))
    return name[: at + 1] + "\n" + name[at + 1 :]


def _column(run: LoadedRun, kind: str, name: str) -> dict[int, float]:
    """Return the values of one metric by step, without those that are not finite numbers."""
    rows = ((r.step, r.values.get(name)) for r in run.metrics(kind))
    return {s: float(v) for s, v in rows if isinstance(v, int | float) and math.isfinite(v)}


def _layers(row: MetricsRow) -> list[dict[str, Any]]:
    layers = row.values.get("layers")
    return [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []


def _finite(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _attention_mean(run: LoadedRun, panel: str) -> dict[int, float]:
    """Return the values of a panel by step: the mean over layers, and over Q and K where both are logged."""
    found = {}
    for row in run.metrics("attention"):
        values = _finite(entry.get(name) for entry in _layers(row) for name in ATTENTION[panel])
        if values:
            found[row.step] = float(np.mean(values))
    return found


def _last_entropy(run: LoadedRun) -> np.ndarray | None:
    """Return the entropies at the last logged step as (layers, heads); None if heads are missing."""
    rows = run.metrics("attention")
    heads = [entry.get("entropy_heads") for entry in _layers(rows[-1])] if rows else []
    grid = [_finite(h) for h in heads if isinstance(h, list)]
    return np.array(grid) if grid and len({len(x) for x in grid}) == 1 and grid[0] else None


def _series(runs: Sequence[dict[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that all runs (one per seed) have in common, and the values as (seeds, steps)."""
    runs = [r for r in runs if r]
    if not runs:
        return np.array([]), np.empty((0, 0))
    steps = sorted(set.intersection(*(set(r) for r in runs)))
    return np.array(steps), np.array([[r[s] for s in steps] for r in runs])
