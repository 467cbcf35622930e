"""The report in a browser: an empty console, no network request, visible figures, no sideways scrolling."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oelm.report.report import write_html
from run_factory import analyze, write_study

pytestmark = pytest.mark.slow

SHOTS = os.environ.get("OELM_SCREENSHOTS", "")  # folder to keep the screenshots in


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    analysis = analyze(write_study(folder / "runs", attention=True))
    return {lang: write_html(analysis, folder / f"report_{lang}.html", lang=lang) for lang in ("en", "zh")}


@pytest.mark.parametrize(
    ("lang", "width", "dark"),
    [("en", 1280, False), ("en", 390, True), ("zh", 1280, True), ("zh", 390, False)],
)
def test_report_in_a_browser(browser, pages, tmp_path, lang, width, dark):
    browser.requests.clear()
    browser.console.clear()
    browser.open(pages[lang], width=width, dark=dark)
    # The contents of closed parts must fit too.
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.bar, .plot canvas')].map(s => { const r = s.getBoundingClientRect();"
        " return [r.width, r.height]; })"
    )
    assert len(sizes) >= 6
    assert all(w > 150 and h > 30 for w, h in sizes)
    drawn = browser.evaluate(
        "[...document.querySelectorAll('figure.chart')].map(f => f.oelmChart.uplot.data)"
    )
    stated = browser.evaluate(
        "[...document.querySelectorAll('figure.chart script')].map(s => JSON.parse(s.textContent))"
    )
    assert [data[0] for data in drawn] == [data["steps"] for data in stated]
    assert [data[3] for data in drawn] == [data["lines"][0]["mean"] for data in stated]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = (
        browser.evaluate(f"getComputedStyle(document.body).{p}") for p in ("color", "backgroundColor")
    )
    assert (_light(ink) > _light(paper)) == dark
    shot = Path(SHOTS or tmp_path) / f"report_{lang}_{width}_{'dark' if dark else 'light'}.png"
    browser.screenshot(shot)
    assert shot.stat().st_size > 20_000
    assert browser.console == []
    assert {u for u in browser.requests if not u.startswith("data:")} == {pages[lang].resolve().as_uri()}


def _light(colour: str) -> float:
    return sum(float(x) for x in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])
