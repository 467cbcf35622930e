"""The board in a real Chromium: right numbers, live updates, hostile text, and no request to elsewhere."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from board_server import BoardServer

from oelm.runs.folder import RunFolder
from oelm.runs.schema import BestMetric, Status
from run_factory import lm_config, write_run

pytestmark = pytest.mark.slow

SHOTS = os.environ.get("OELM_SCREENSHOTS", "")  # folder to keep the screenshots in
XSS = "<img src=x onerror=\"document.title='hacked'\">"
STEPS = list(range(20, 401, 20))


def training_loss(step: int, seed: int, arm: int) -> float:
    return 2.0 + 0.1 * arm + 4 * math.exp(-step / 80) + 0.02 * seed


def rows(seed: int, arm: int, steps: list[int]) -> str:
    lines = []
    for step in steps:
        lines.append({"step": step, "kind": "train", "loss": training_loss(step, seed, arm), "lr": 1e-3})
        if step % 100 == 0:
            lines.append({"step": step, "kind": "validation", "loss": 2.0, "ppl": 8.0 + seed, "n": 10})
            layers = [{"layer": 0, "entropy": 1.0 + arm}, {"layer": 1, "entropy": 2.0 + arm}]
            lines.append({"step": step, "kind": "attention", "layers": layers})
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_costs(path: Path, arm: int, steps: int) -> None:
    """Step times of 0.25 s (arm 0) or 0.5 s, and a peak of 1 or 2 GiB with every twentieth step."""
    times = np.zeros((steps, 4))
    times[:, 0] = 0.25 * (1 + arm)
    times[:3, 0] *= -1  # warm-up
    times.astype("<f8").tofile(path / "step_times.bin")
    memory = np.zeros(steps)
    memory[19::20] = (1 + arm) * 2**30
    memory.astype("<f8").tofile(path / "step_memory.bin")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two arms with three finished seeds, a running seed, a diverged one with hostile text, a stalled one."""
    root = tmp_path_factory.mktemp("board") / "runs"
    for arm, (id, name) in enumerate((("GPT-01", "baseline"), ("GPT-02", "oelm-freeze"))):
        for seed in range(3):
            path = write_run(root, lm_config(id, name, seed=seed), 8.0 + 0.6 * arm + 0.02 * seed)
            RunFolder(path).metrics_file.write_text(rows(seed, arm, STEPS), encoding="utf-8")
            write_costs(path, arm, 400)
            RunFolder(path).write_checksums()
    for seed, state, reason in ((3, "running", ""), (4, "diverged", XSS), (5, "oom", "no memory left")):
        folder = RunFolder(write_run(root, lm_config("GPT-02", "oelm-freeze", seed=seed), state=state))
        folder.metrics_file.write_text(rows(seed, 1, STEPS[:10]), encoding="utf-8")
        write_costs(folder.path, 1, 200)
        folder.log_file.write_text(f"first line\n{XSS}\n", encoding="utf-8")
        folder.write_status(status(200, state=state, reason=reason))
        folder.close()
    hostile = replace(lm_config(), study="X" + XSS.replace("/", ""), id="ID" + XSS.replace("/", ""))
    write_run(root, hostile)
    with BoardServer(root) as running:
        yield running


def status(step: int, **changes: Any) -> Status:
    now = Status(step=step, total_steps=400, loss=2.5, metric=BestMetric("ppl", 9.0), eta_seconds=90.0)
    live = replace(
        now, steps_per_second=2.0, pid=os.getpid(), host=socket.gethostname(), heartbeat=time.time()
    )
    return replace(live, **changes)


PAGES = {
    "overview": "",
    "study": "study?name=paper",
    "question": "question?study=paper&kind=baseline&scale=mini&arm=GPT-02&reference=GPT-01",
    "run": f"run?run={quote('paper/GPT-02/scale=mini/seed=4')}",
    "compare": f"compare?a={quote('paper/GPT-01/scale=mini/seed=0')}"
    f"&b={quote('paper/GPT-02/scale=mini/seed=0')}",
    "hostile": f"study?name={quote('X' + XSS)}",
}


def wait_for(browser, expression: str) -> Any:
    """Return the value of an expression as soon as it is true. The limit is generous for busy machines."""
    deadline = time.monotonic() + 120
    while not (value := browser.evaluate(expression)):
        assert time.monotonic() < deadline, f"still false: {expression}"
        time.sleep(0.05)
    return value


def open_page(browser, server, page: str, *, lang: str = "en", width: int = 1300, dark: bool = False) -> None:
    browser.requests.clear()
    browser.console.clear()
    browser.open(f"{server.url}{lang}/{PAGES[page]}", width=width, dark=dark)
    wait_for(browser, "document.getElementById('connection').className === 'on'")


@pytest.mark.parametrize(
    ("page", "lang", "width", "dark"),
    [
        *((page, "en", 1300, False) for page in PAGES),
        *((page, "zh", 400, True) for page in PAGES),
    ],
)
def test_pages_load_in_both_widths_languages_and_colours(browser, server, tmp_path, page, lang, width, dark):
    open_page(browser, server, page, lang=lang, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    charts = browser.evaluate("document.querySelectorAll('figure.chart').length")
    assert charts == {"overview": 0, "hostile": 1, "run": 6, "compare": 6}.get(page, 2)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('figure.chart canvas')].map(c => [c.clientWidth, c.clientHeight])"
    )
    assert len(sizes) == charts
    assert all(w > 200 and h > 100 for w, h in sizes)
    ink, paper = (
        browser.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).reduce((a, b) => a + +b, 0)")
        for name in ("color", "backgroundColor")
    )
    assert (ink > paper) == dark
    browser.screenshot(Path(SHOTS or tmp_path) / f"board_{page}_{lang}_{width}.png")
    assert browser.console == []
    assert all(url.startswith((server.url, "data:")) for url in browser.requests), browser.requests


def test_curves_have_the_numbers_of_the_files(browser, server):
    open_page(browser, server, "study")
    browser.evaluate(
        "(() => { const s = document.querySelectorAll('[data-measurement]')[1]; s.value = 'loss';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    chart = "document.querySelectorAll('figure.chart')[1].oelmChart"
    wait_for(browser, f"{chart}.data.measurement === 'loss'")
    steps, *columns = json.loads(browser.evaluate(f"JSON.stringify({chart}.uplot.data)"))
    roles = json.loads(browser.evaluate(f"JSON.stringify({chart}.roles)"))
    assert steps == STEPS
    means = [c for c, role in zip(columns, roles[1:], strict=True) if role["kind"] == "mean"]
    assert len(means) == 2
    for arm, mean in enumerate(means):
        for step, value in zip(STEPS, mean, strict=True):
            running = [0, 1, 2] if arm == 0 or step > 200 else [0, 1, 2, 3, 5]  # seed 4 diverged
            expected = sum(training_loss(step, seed, arm) for seed in running) / len(running)
            assert value == pytest.approx(expected, rel=1e-5)
    # The table says the same, for those who cannot see the curves.
    browser.evaluate("document.querySelectorAll('figure.chart details')[1].open = true")
    cell = "document.querySelectorAll('figure.chart')[1].querySelector('tbody tr:last-child td')"
    text = wait_for(browser, f"({cell} || {{}}).textContent")
    assert float(text.split(" ")[0]) == pytest.approx(training_loss(400, 1, 0), rel=1e-4)
    assert text.endswith("n = 3)")
    assert "baseline" in browser.evaluate("document.querySelector('figure.chart .plot').ariaLabel")


def test_two_runs_are_drawn_over_each_other_with_their_costs(browser, server):
    open_page(browser, server, "compare")
    charts = "[...document.querySelectorAll('figure.chart')].map(f => f.oelmChart)"
    wait_for(browser, f"{charts}.every(c => c && c.data.lines.length === 2)")
    drawn = json.loads(
        browser.evaluate(f"JSON.stringify({charts}.map(c => [c.data.measurement, c.uplot.data]))")
    )
    last = {name: [data[0], *(column[-1] for column in data[3::4])] for name, data in drawn}
    assert list(last) == ["ppl", "loss", "lr", "entropy", "step_time", "memory"]
    assert last["lr"][1:] == [1e-3, 1e-3]
    assert last["entropy"][1:] == [1.5, 2.5]  # the mean of the layers
    assert last["step_time"][1:] == [0.25, 0.5]
    assert last["step_time"][0] == list(range(4, 401))
    assert last["memory"][1:] == [1.0, 2.0]
    assert last["memory"][0] == STEPS
    assert last["loss"][1:] == pytest.approx([training_loss(400, 0, 0), training_loss(400, 0, 1)], rel=1e-5)


def test_single_seeds_appear_with_the_focus_and_arrow_keys_move_along_the_steps(browser, server):
    open_page(browser, server, "study")
    chart = "document.querySelector('figure.chart').oelmChart"
    wait_for(browser, f"!!{chart}")
    shown = f"{chart}.uplot.series.filter((s, i) => {chart}.roles[i].kind === 'seed' && s.show).length"
    assert browser.evaluate(shown) == 0
    browser.evaluate("document.querySelector('.legend button').focus()")
    assert wait_for(browser, shown) == 3
    browser.evaluate("document.querySelector('.legend button').blur()")
    wait_for(browser, f"{shown} === 0")
    browser.evaluate("document.querySelector('.chart .plot').focus()")
    for key in ("Home", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
    assert wait_for(browser, f"{chart}.uplot.cursor.idx") == 1
    assert browser.evaluate("document.querySelector('.readout').textContent") == "step 200"


def test_new_rows_states_and_verdicts_appear_by_themselves(browser, server):
    browser.console.clear()
    folder = RunFolder(server.board.root / "paper" / "GPT-02" / "scale=mini" / "seed=3")
    browser.open(f"{server.url}en/run?run={quote('paper/GPT-02/scale=mini/seed=3')}", width=1300)
    steps = "[...document.querySelectorAll('figure.chart')].map(f => f.oelmChart.data.steps.at(-1))"
    last = f"Math.max(...{steps})"
    wait_for(browser, "document.querySelectorAll('figure.chart canvas').length === 6")
    assert browser.evaluate(last) == 200
    browser.evaluate("document.getElementById('config').open = true")
    with open(folder.metrics_file, "a", encoding="utf-8") as file:
        file.write(rows(3, 1, [220]))
    with open(folder.log_file, "a", encoding="utf-8") as file:
        file.write("step 220 reached\n")
    folder.write_status(status(220))
    wait_for(browser, f"{last} === 220")
    wait_for(browser, "document.getElementById('log').textContent.includes('step 220 reached')")
    wait_for(browser, "document.getElementById('headline').textContent.includes('step 220 of 400')")
    folder.write_status(status(240, state="diverged", reason="the loss became nan"))
    folder.close()
    wait_for(browser, "document.querySelector('#headline .chip.bad')?.textContent === 'diverged'")
    assert browser.evaluate("document.getElementById('config').open") is True  # what a reader opened stays
    assert browser.console == []


def test_charts_appear_with_the_first_measurements(browser, tmp_path):
    folder = RunFolder(write_run(tmp_path, lm_config(), state="running"))
    folder.write_status(status(0))
    folder.metrics_file.write_text("", encoding="utf-8")
    with BoardServer(tmp_path) as server:
        browser.console.clear()
        browser.open(f"{server.url}en/study?name=paper", width=1300)
        wait_for(browser, "document.querySelector('.charts').textContent.includes('No measurements yet')")
        folder.metrics_file.write_text(rows(0, 0, [20, 40]), encoding="utf-8")
        wait_for(browser, "document.querySelector('figure.chart')?.oelmChart?.data.steps.length === 2")
        folder.metrics_file.write_text(rows(0, 0, [20, 40, 60, 80, 100]), encoding="utf-8")
        wait_for(browser, "[...document.querySelectorAll('option')].some(o => o.value === 'ppl')")
        assert browser.console == []
        browser.open("about:blank", width=1300)
    folder.close()


def test_hostile_names_and_logs_stay_text(browser, server):
    for page in ("overview", "study", "run", "hostile"):
        open_page(browser, server, page)
        assert "hacked" not in browser.evaluate("document.title").replace(XSS, "")
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert XSS in browser.evaluate("document.body.textContent")
        assert browser.console == []


def test_a_deleted_run_is_shown_as_missing_until_it_comes_back(browser, tmp_path):
    path = write_run(tmp_path / "runs", lm_config())
    with BoardServer(tmp_path / "runs") as server:
        browser.open(f"{server.url}en/run?run={quote('paper/GPT-01/scale=mini/seed=0')}", width=1300)
        wait_for(browser, "document.getElementById('connection')?.className === 'on'")
        path.rename(tmp_path / "elsewhere")
        wait_for(browser, "document.getElementById('missing')?.textContent === 'Not found'")
        wait_for(browser, "document.getElementById('connection')?.className === 'on'")
        (tmp_path / "elsewhere").rename(path)
        wait_for(browser, "document.querySelector('h1')?.textContent === 'GPT-01 mini seed 0'")
    browser.open("about:blank", width=1300)
    browser.console.clear()


def test_the_page_shows_a_lost_connection(browser, tmp_path):
    write_run(tmp_path, lm_config())
    with BoardServer(tmp_path) as server:
        open_page(browser, server, "overview")
    wait_for(browser, "document.getElementById('connection').textContent.startsWith('no connection')")
    browser.open("about:blank", width=1300)
    browser.console.clear()
