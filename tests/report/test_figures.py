"""Figures: every arm is drawn, can be told apart and has its name as text; the SVG is valid."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oelm.analysis.costs import StepRatio
from oelm.report.figures import charts, plots
from oelm.report.figures.drawing import PAPER, ArmStyles, legend_below, new_canvas, plot_style
from oelm.report.figures.plots import all_drawings, changes, step_times
from oelm.report.summary import by_group
from oelm.report.translate import Translator
from run_factory import analyze, write_study


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    return analyze(write_study(tmp_path_factory.mktemp("runs"), attention=True))


@pytest.fixture(scope="module")
def baseline(analysis):
    return analysis.comparisons.of("baseline")


def test_every_figure_for_a_paper_is_saved_at_column_width(analysis, tmp_path):
    with plot_style(PAPER):
        drawn = list(all_drawings(analysis, Translator()))
    assert {d.name.partition("-")[0] for d in drawn} == {"changes", "curves"}
    forest, curve = drawn[0], drawn[-1]
    for drawing in (forest, curve):
        pdf, png = drawing.save(tmp_path)
        assert pdf.read_bytes().startswith(b"%PDF")
        assert png.read_bytes().startswith(b"\x89PNG")
        assert drawing.canvas.get_size_inches()[0] == PAPER.width
    svg = forest.svg()
    ET.fromstring(svg)
    assert "oelm-random-matched" in svg
    assert "5 %" in svg


def test_a_forest_of_accuracies_shows_the_scenarios(baseline):
    accuracy = [c for c in baseline if c.metric == "accuracy"]
    assert "C | A" in changes(accuracy, ArmStyles([]), Translator(), name="changes").svg()


def test_curves_show_the_mean_over_seeds_and_its_interval(analysis):
    found = charts.all_charts(analysis, Translator())["training"]
    data = found[0].charts[0].data
    arm = next(a for a in analysis.arms if a.name == data["lines"][0]["name"])
    last = [list(run.reader.metrics("validation"))[-1].values["loss"] for run in arm.finished]
    line = data["lines"][0]
    assert line["mean"][-1] == pytest.approx(np.mean(last), rel=1e-5)
    low, high = stats.t.interval(0.95, len(last) - 1, np.mean(last), stats.sem(last))
    assert (line["low"][-1], line["high"][-1]) == (
        pytest.approx(low, rel=1e-5),
        pytest.approx(high, rel=1e-5),
    )
    assert [seed["values"][-1] for seed in line["seeds"]] == pytest.approx(last)


def test_figures_in_chinese_have_chinese_words(baseline):
    perplexity = [c for c in baseline if c.metric == "ppl"]
    assert "困惑度变化" in changes(perplexity, ArmStyles([]), Translator("zh"), name="changes").svg()


def test_a_forest_with_many_rows_is_divided_without_losing_an_arm(monkeypatch, baseline):
    monkeypatch.setattr(plots, "MAX_ROWS", 2)
    parts = list(plots._forests(baseline))
    assert [len(part) for part in parts] == [2, 2, 1, 1]
    assert [c for part in parts for c in part] == baseline


def test_no_two_of_forty_arms_look_alike():
    styles = ArmStyles([str(i) for i in range(40)])
    assert len({tuple(map(str, styles.of(str(i)).values())) for i in range(40)}) == 40


def test_step_times_without_a_memory_measurement_are_drawn(analysis):
    benchmark = StepRatio(
        "oelm-freeze", "mini", 128, "rope", 0.95, (0.9, 1.0), None, Path("step.json"), "turns"
    )
    with plot_style():
        svg = step_times([benchmark], ArmStyles([]), Translator()).svg()
    assert "oelm-freeze · mini · step" in svg
    ET.fromstring(svg)


def test_many_arms_are_drawn_in_parts_that_start_with_their_reference(monkeypatch, analysis):
    group = max(by_group(analysis.comparisons.of("baseline")).values(), key=len)
    (alone,) = charts.in_parts(group)
    assert alone[0].id == group[0].reference.id
    assert {a.id for a in alone[1:]} == {c.arm.id for c in group}
    monkeypatch.setattr(charts, "MAX_ARMS", 3)
    by_id = {c.arm.id: c for c in group}
    control = by_id.pop("GPT-01O")
    first, *others = (c for c in by_id.values() if c.arm.config.compare.control == "GPT-01O")
    parts = list(charts.in_parts([first, *others, control]))  # the control is given last
    assert parts[0] == [alone[0], first.arm, control.arm]
    assert all(part[0] is alone[0] and 1 < len(part) <= 3 for part in parts)
    assert sorted(a.id for part in parts[1:] for a in part[1:]) == sorted(c.arm.id for c in others)


def test_a_legend_with_many_long_names_fits_into_its_figure():
    with plot_style():
        figure, axes = new_canvas(3.0)
        for i in range(23):
            axes.plot([0, 1], [0, i], label=f"trained-plus-temperature-{i:03d}")
        legend_below(figure, axes)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box, page = legend.get_window_extent(), figure.bbox
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
        assert axes.get_window_extent().height > 0.25 * page.height
