"""The figure of `oelm probe`: what trained and frozen queries and keys do, several methods side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oelm.report.figures.drawing import ArmStyles, Drawing, legend_below, new_canvas, plot_style

CAPTION = (
    "Left: share of the constant part in the energy of q and k. Middle: attention weight by distance, mean "
    "over all layers but the first. Right: rise of the perplexity if the learned change of W is cut to a "
    "rank. Each line is the mean over the runs of a method."
)


def probe_figure(probes: Sequence[Mapping[str, Any]], name: str) -> Drawing:
    """Draw the results of several probes; runs of the same method are averaged.

    probes: what `oelm probe --json` prints about each run
    """
    methods = list(dict.fromkeys(probe["method"] for probe in probes))
    styles = ArmStyles(methods)
    with plot_style():
        canvas, (left, middle, right) = new_canvas(2.6, 3)
        for method in methods:
            runs = [probe for probe in probes if probe["method"] == method]
            style = {**styles.of(method), "label": method, "markersize": 4}
            constant = np.mean([[(row["q"] + row["k"]) / 2 for row in run["constant"]] for run in runs], 0)
            left.plot(range(1, len(constant) + 1), 100 * constant, **style)
            later = [run["by_distance"][1:] or run["by_distance"] for run in runs]
            weights = np.mean([np.mean(layers, 0) for layers in later], 0)
            middle.plot(range(len(weights)), 100 * weights, **style)
            if runs[0]["truncation"]:
                ranks = [int(rank) for rank in runs[0]["truncation"]]
                rise = [[100 * (math.exp(d) - 1) for d in run["truncation"].values()] for run in runs]
                right.plot(range(len(ranks)), np.mean(rise, 0), **style)
                right.set_xticks(range(len(ranks)), map(str, ranks))
        left.set(
            xlabel="layer", ylabel="constant part, %", ylim=(0, None), xticks=range(1, len(constant) + 1)
        )
        middle.set(xlabel="distance in tokens", ylabel="attention weight, %", ylim=(0, None))
        right.set(xlabel="rank", ylabel="rise of the perplexity, %")
        for axes in (left, middle, right):
            axes.grid(axis="y")
        legend_below(canvas, left)
        return Drawing(name, canvas, CAPTION)
