"""What the report draws, from comparisons and run folders."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib import colormaps

from oelm.analysis.analyze import Analysis
from oelm.analysis.compare import Arm, Comparison
from oelm.analysis.load import LoadedRun
from oelm.analysis.messages import Message
from oelm.analysis.verdict import SCENARIO_A, SCENARIO_B, TARGET
from oelm.report.document import Figure
from oelm.report.figures import COLOURS, INK, Look, canvas, house_style, legend_below, to_svg
from oelm.report.sections import MAX_CURVE_GROUPS
from oelm.report.sentences import group_title
from oelm.report.summary import by_group
from oelm.report.translate import Translator

# panel -> fields of a layer's entry in metrics.jsonl; frozen Q/K carry no distance, it cannot change
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
MOST_LETTERS = 30
MOST_ROWS = 40  # of one forest; more arms get a figure each
MOST_ARMS = len(COLOURS)  # of one drawing of curves, so that no two share a colour


def all_figures(analysis: Analysis, _: Translator) -> dict[str, list[Figure]]:
    """Section -> figures, in reading order."""
    with house_style():
        return _all_figures(analysis, _)


def _all_figures(analysis: Analysis, _: Translator) -> dict[str, list[Figure]]:
    made = analysis.comparisons
    look = Look([a.name for a in analysis.arms])
    figures: dict[str, list[Figure]] = {"comparisons": [], "training": [], "costs": []}
    perplexity = [c for c in made.of("baseline") if c.metric == "ppl" and c.effect is not None]
    for i, rows in enumerate(_forests(perplexity)):
        figures["comparisons"].append(gap(rows, look, _, name=f"gap-{i}"))
    for i, group in enumerate(by_group(made.of("baseline")).values()):
        accurate = [c for c in group if c.metric == "accuracy" and c.effect is not None]
        if accurate:
            figures["comparisons"].append(accuracy(accurate, look, _, name=f"accuracy-{i}"))
        if i >= MAX_CURVE_GROUPS:
            continue
        title = group_title(group[0], _)
        for j, arms in enumerate(_parts(group)):
            part, colours = f"{i}-{j}", Look([a.name for a in arms])
            for drawn in (
                curves(arms, colours, _, title, name=f"curves-{part}"),
                attention(arms, colours, _, title, name=f"attention-{part}"),
                heads(arms, _, title, name=f"heads-{part}"),
            ):
                if drawn is not None:
                    figures["training"].append(drawn)
    shares = [c for c in made.of("baseline") if c.ratio is not None and c.arm.freezes and not c.arm.probes]
    if shares:
        figures["costs"].append(parameters(shares, look, _))
    return figures


def _parts(group: Sequence[Comparison]) -> Iterator[list[Arm]]:
    """The arms of a group in portions that can be told apart: those of one reference, which leads each
    portion, and an arm beside its control where that is not drawn yet."""
    references = {c.reference.id: c.reference for c in group}
    for reference in references.values():
        left = {c.arm.id: c.arm for c in group if c.reference.id == reference.id}
        part = [reference]
        while left:
            arm = left.pop(next(iter(left)))
            paired = [a.id for a in left.values() if arm.id == _control(a) or a.id == _control(arm)]
            together = [arm, *(left.pop(other) for other in paired[:1])]
            if len(part) > 1 and len(part) + len(together) > MOST_ARMS:
                yield part
                part = [reference]
            part += together
        yield part


def _control(arm: Arm) -> str:
    return arm.config.compare.control


def _forests(comparisons: Sequence[Comparison]) -> Iterator[Sequence[Comparison]]:
    """A study a figure, as their changes differ by orders of magnitude; a long one takes several."""
    for _study, of_study in groupby(comparisons, key=lambda c: c.arm.config.study):
        rows: list[Comparison] = []
        for _dataset, of_dataset in groupby(of_study, key=lambda c: c.dataset):
            more = list(of_dataset)
            if rows and len(rows) + len(more) > MOST_ROWS:
                yield rows
                rows = []
            rows += more
            while len(rows) > MOST_ROWS:
                yield rows[:MOST_ROWS]
                rows = rows[MOST_ROWS:]
        if rows:
            yield rows


def gap(comparisons: Sequence[Comparison], look: Look, _: Translator, *, name: str) -> Figure:
    """A forest of perplexity changes with intervals and the 5 % line, grouped by dataset."""
    rows: list[_Row] = []
    for c in comparisons:
        assert c.effect is not None
        bounds = c.effect.interval
        interval = None if bounds is None else (_percent(bounds[0]), _percent(bounds[1]))
        label = f"{_short(c.arm.name)} · {_short(c.dataset)}"
        rows.append((label, look.of(c.arm.name), _percent(c.effect.value), interval))
    figure, axes = _forest(rows, name)
    axes.axvline(0, color=INK, linewidth=0.8)
    _cut(axes, 100 * TARGET, "5 %")
    axes.set_xlabel(_("change of perplexity, %"))
    return _figure(
        name,
        figure,
        _(
            "Change of perplexity against the baseline. Dot: mean over seeds; bar: 95 % interval; dashed:"
            " the 5 % target. A hollow dot has one seed and no interval."
        ),
    )


def accuracy(comparisons: Sequence[Comparison], look: Look, _: Translator, *, name: str) -> Figure:
    """A forest of accuracies with the interval of the difference, and the lines between scenarios if any."""
    reference = comparisons[0].reference
    base = 100 * reference.mean
    rows: list[_Row] = [(_short(reference.name), look.of(reference.name), base, None)]
    for c in comparisons:
        assert c.effect is not None
        bounds = c.effect.interval
        interval = None if bounds is None else (base + bounds[0], base + bounds[1])
        rows.append((_short(c.arm.name), look.of(c.arm.name), base + c.effect.value, interval))
    figure, axes = _forest(rows, name)
    axes.axvline(base, color=INK, linewidth=0.8)
    cuts = ((SCENARIO_A, "C | A"), (SCENARIO_B, "B | C")) if any(c.scenario for c in comparisons) else ()
    for cut, text in cuts:
        _cut(axes, base + cut, text, across=True)
    axes.set_xlabel(_("accuracy, %"))
    title = group_title(comparisons[0], _)
    if cuts:
        caption = _(
            "{title}. Test accuracy, mean over seeds; the bar is the 95 % interval of the difference "
            "from the baseline. Hollow: the baseline, or an arm with one seed. Dashed: two and five "
            "points below the baseline, the borders between scenarios A, C and B.",
            title=title,
        )
    else:
        caption = _(
            "{title}. Test accuracy, mean over seeds; the bar is the 95 % interval of the difference "
            "from the baseline. Hollow: the baseline, or an arm with one seed.",
            title=title,
        )
    return _figure(name, figure, caption)


_Row = tuple[str, dict[str, Any], float, tuple[float, float] | None]  # label, look, value, interval


def _forest(rows: Sequence[_Row], name: str) -> tuple[Any, Any]:
    """A line each: the value, hollow where it has no interval."""
    figure, axes = canvas(name, 1.1 + 0.3 * len(rows))
    for y, (_label, style, value, interval) in enumerate(rows):
        colour, face = style["color"], "none"
        if interval is not None:
            axes.plot(interval, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            face = colour
        axes.plot([value], [y], marker=style["marker"], color=colour, markerfacecolor=face, linestyle="")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.9)
    axes.grid(axis="x")
    return figure, axes


def _cut(axes: Any, x: float, text: str, *, across: bool = False) -> None:
    """A line between verdicts, its text beside it or across."""
    axes.axvline(x, color=INK, linewidth=1.2, linestyle="--")
    beside, side = (0, "center") if across else (3, "left")
    axes.annotate(text, (x, 1), xycoords=("data", "axes fraction"), xytext=(beside, -2),
                  textcoords="offset points", ha=side, va="top", color=INK)  # fmt: skip


def curves(arms: Iterable[Arm], look: Look, _: Translator, title: str, *, name: str) -> Figure | None:
    """Validation loss over steps, mean and range over seeds."""
    figure, axes = canvas(name, 3.0)
    drawn = False
    for arm in arms:
        steps, values = _series([_column(r, "validation", "loss") for r in arm.finished])
        if len(steps) < 2:
            continue
        style = look.of(arm.name)
        axes.plot(
            steps,
            values.mean(axis=0),
            label=_short(arm.name),
            markevery=max(1, len(steps) // 8),
            markersize=4,
            **style,
        )
        if len(values) > 1:
            axes.fill_between(
                steps, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15, lw=0
            )
        drawn = True
    if not drawn:
        return None
    axes.set_xlabel(_("step"))
    axes.set_ylabel(_("validation loss"))
    axes.grid()
    legend_below(figure, axes)
    return _figure(
        name,
        figure,
        _("Validation loss, {title}. Line: mean over seeds; band: lowest to highest seed.", title=title),
    )


def parameters(comparisons: Sequence[Comparison], look: Look, _: Translator) -> Figure:
    """Trained share of Q/K against the loss of quality, of arms that freeze."""
    figure, axes = canvas("parameters", 3.4)
    seen: set[str] = set()
    most = 5.0
    for c in comparisons:
        result = c.arm.finished[0].result
        if result is None or c.ratio is None or not result.parameters.qk_total:
            continue
        worse = _percent(c.ratio.value) if c.metric == "ppl" else -_percent(c.ratio.value)
        x = 100 * result.parameters.qk_trainable / result.parameters.qk_total
        most = max(most, x)
        style = look.of(c.arm.name)
        label = _short(c.arm.name) if c.arm.name not in seen else None
        seen.add(c.arm.name)
        axes.plot(
            [x],
            [worse],
            marker=style["marker"],
            color=style["color"],
            linestyle="",
            markersize=7,
            label=label,
        )
    axes.axhline(100 * TARGET, color=INK, linewidth=1.2, linestyle="--")
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlim(-0.04 * most, 1.04 * most)
    axes.set_xlabel(_("trained share of Q/K, %"))
    axes.set_ylabel(_("loss of quality, %"))
    axes.grid()
    legend_below(figure, axes)
    return _figure(
        "parameters",
        figure,
        _(
            "Frozen arms without the probe tasks: trained share of the Q/K parameters against the loss of"
            " quality. Lower is better on both axes."
        ),
    )


def attention(arms: Iterable[Arm], look: Look, _: Translator, title: str, *, name: str) -> Figure | None:
    """Entropy, logit scale and distance from orthogonality over training, averaged over heads and layers."""
    found: dict[str, list[tuple[str, Any, Any]]] = defaultdict(list)
    for arm in arms:
        for what in ATTENTION:
            steps, values = _series([_attention_mean(r, what) for r in arm.finished])
            if len(steps):
                found[what].append((arm.name, steps, values.mean(axis=0)))
    if not found:
        return None
    kinds = [k for k in ATTENTION if k in found]
    figure, axes = canvas(name, 2.6, len(kinds), squeeze=False)
    for panel, what in zip(axes[0], kinds, strict=True):
        for label, steps, values in found[what]:
            panel.plot(steps, values, label=_short(label), markersize=4, **look.of(label))
        panel.set_title(_(PANEL_TITLES[what]))
        panel.set_xlabel(_("step"))
        panel.grid()
    legend_below(figure, axes[0][0])
    return _figure(
        name,
        figure,
        _("Attention during training, {title}: mean over heads, layers and seeds of each arm.", title=title),
    )


def heads(arms: Sequence[Arm], _: Translator, title: str, *, name: str) -> Figure | None:
    """The last entropy of each head as a map, layer by head."""
    found = ((a.name, _last_entropy(a.finished[0])) for a in arms if a.finished)
    maps = [(arm, grid) for arm, grid in found if grid is not None]
    if not maps:
        return None
    rows = math.ceil(len(maps) / 4)
    columns = math.ceil(len(maps) / rows)
    figure, axes = canvas(name, 2.6 * rows, columns, rows=rows, squeeze=False)
    panels = list(axes.flat)
    for unused in panels[len(maps) :]:
        unused.set_visible(False)
    highest = max(float(np.nanmax(g)) for arm, g in maps)
    image: Any = None
    for panel, (arm, grid) in zip(panels, maps, strict=False):
        image = panel.pcolormesh(
            grid, cmap=colormaps["cividis"].resampled(16), vmin=0, vmax=highest, edgecolors="none"
        )
        panel.set_title(_broken(arm))
        panel.set_xlabel(_("head"))
        panel.set_xticks(np.arange(grid.shape[1]) + 0.5, [str(i + 1) for i in range(grid.shape[1])])
        panel.set_yticks(np.arange(grid.shape[0]) + 0.5, [str(i + 1) for i in range(grid.shape[0])])
    for first in axes[:, 0]:
        first.set_ylabel(_("layer"))
    bar = figure.colorbar(image, ax=panels, shrink=0.9)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_visible(False)
    return _figure(
        name,
        figure,
        _(
            "Entropy of attention per layer and head at the end of training, {title} (first seed).",
            title=title,
        ),
    )


def _figure(name: str, figure: Any, caption: str) -> Figure:
    return Figure(name, to_svg(figure, caption), caption)


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _short(name: str) -> str:
    """A name must not push the drawing off its own figure."""
    return name if len(name) <= MOST_LETTERS else name[: MOST_LETTERS - 1] + "…"


def _broken(name: str) -> str:
    """A long arm name on two lines."""
    name = _short(name)
    if len(name) <= 12 or "-" not in name:
        return name
    cuts = [i for i, c in enumerate(name) if c == "-"]
    at = min(cuts, key=lambda i: abs(i - len(name) / 2))
    return name[: at + 1] + "\n" + name[at + 1 :]


def _column(run: LoadedRun, kind: str, name: str) -> dict[int, float]:
    """step -> value of one metric; what is no finite number is left out."""
    rows = ((r["step"], r.get(name)) for r in run.metrics(kind))
    return {s: float(v) for s, v in rows if isinstance(v, int | float) and math.isfinite(v)}


def _layers(row: dict[str, Any]) -> list[dict[str, Any]]:
    layers = row.get("layers")
    return [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def _attention_mean(run: LoadedRun, panel: str) -> dict[int, float]:
    """step -> mean over layers (and over Q and K where both are logged)."""
    found = {}
    for row in run.metrics("attention"):
        values = _numbers(entry.get(name) for entry in _layers(row) for name in ATTENTION[panel])
        if values:
            found[row["step"]] = float(np.mean(values))
    return found


def _last_entropy(run: LoadedRun) -> np.ndarray | None:
    """(layers, heads) at the last step that was logged."""
    rows = run.metrics("attention")
    heads = [entry.get("entropy_heads") for entry in _layers(rows[-1])] if rows else []
    grid = [_numbers(h) for h in heads if isinstance(h, list)]
    return np.array(grid) if grid and len({len(x) for x in grid}) == 1 and grid[0] else None


def _series(runs: Sequence[dict[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all seeds share, and (seeds, steps) of their values."""
    runs = [r for r in runs if r]
    if not runs:
        return np.array([]), np.empty((0, 0))
    steps = sorted(set.intersection(*(set(r) for r in runs)))
    return np.array(steps), np.array([[r[s] for s in steps] for r in runs])
