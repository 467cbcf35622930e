"""The board without a browser: what it shows, what it refuses, and how little it reads again."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from scipy import stats

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from board_server import TOKEN, BoardServer

from oelm.cli.board import HOST, listen
from oelm.config.run_config import QuestionConfig
from oelm.errors import OelmError
from oelm.report.board import pages
from oelm.report.board.metrics import RunMetrics
from oelm.report.board.snapshot import Board
from oelm.report.translate import Translator
from oelm.runs.folder import RunFolder
from oelm.runs.reader import RunReader
from oelm.runs.scan import RunInfo, ScanCache, scan
from oelm.runs.schema import Status
from oelm.training.measure.timing import WARMUP_STEPS, Timer
from run_factory import lm_config, planned, write_run, write_study

RUN = "paper/GPT-02/scale=mini/seed=0"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = write_study(tmp_path_factory.mktemp("board") / "runs", attention=True)
    with BoardServer(root) as running:
        yield running


# -- who is answered --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/en/", "/wrong/static/board.css", "//", "/%00/"])
def test_without_the_token_nothing_is_shown(server, path):
    status, headers, text = server.ask(path)
    assert status == 403
    assert "GPT" not in text
    assert "oelm board" in text  # says where the address is
    assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_answered(server, method):
    status, headers, _text = server.ask(f"/{TOKEN}/en/", method=method)
    assert status == 405
    assert headers["allow"] == "GET, HEAD"


def test_another_host_name_is_refused(server):
    """A website can let its own name point to 127.0.0.1; then its pages have the board's origin."""
    assert server.ask(f"/{TOKEN}/en/", Host="evil.example")[0] == 400
    assert server.ask(f"/{TOKEN}/en/", Host=f"evil.example:{server.port}")[0] == 400
    assert server.ask(f"/{TOKEN}/en/", Host="localhost:9000")[0] == 200  # ssh -L 9000:127.0.0.1:8765


def test_every_answer_has_the_security_headers(server):
    for path in ("en/", "static/board.js", "nowhere/at/all", "en/run?run=nothing"):
        _status, headers, _text = server.ask(f"/{TOKEN}/{path}")
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "en/run?run=../../../../etc/passwd",
        "en/run?run=/etc/passwd",
        f"en/run?run={quote(RUN)}/../seed=1",
        "en/study?name=..",
        "static/../server.py",
        "static/%2e%2e/server.py",
        "static/..%2fserver.py",
        "en/curves?measurement=__class__&study=paper",
    ],
)
def test_a_request_cannot_name_a_file(server, path):
    status, _headers, text = server.ask(f"/{TOKEN}/{path}")
    assert status == 404
    assert "root:" not in text
    assert "Starlette" not in text


def test_it_listens_on_this_machine_only_and_says_what_to_do_about_a_taken_port():
    with listen(0) as listener:
        assert listener.getsockname()[0] == HOST == "127.0.0.1"
        port = listener.getsockname()[1]
        with pytest.raises(OelmError, match=rf"port {port} is in use.*--port 0"):
            listen(port)


# -- what is shown ----------------------------------------------------------------------------


def test_the_overview_answers_first(server):
    page = server.page("en/")
    assert "Questions: 10 decided, 3 undecided." in page
    assert "Runs: 48 of 48 finished, 0 in progress." in page
    assert "oelm-freeze against baseline" in page
    assert "misses 5 %" in page
    assert "+7.0 % to +9.0 %" in page  # the interval that `oelm analyze` prints


def test_every_page_exists_in_chinese(server):
    page = server.page("zh/study?name=paper")
    assert 'lang="zh-CN"' in page
    assert "问题" in page
    assert "Questions" not in page


def test_a_run_page_has_config_log_audit_and_timing(server):
    (server.board.root / RUN / "training.log").write_text("step 1\nstep 2\n", encoding="utf-8")
    page = server.page(f"en/run?run={quote(RUN)}")
    for text in ("step 2", "dataset: tinystories", "at the end", "286 MiB", "oelm train GPT-02"):
        assert text in page


def test_two_runs_are_compared(server):
    other = RUN.replace("GPT-02", "GPT-01")
    page = server.page(f"en/compare?a={quote(other)}&b={quote(RUN)}")
    cells = re.findall(r"<code>method.freeze</code></th><td>(\w+)</td><td>(\w+)</td>", page)
    assert cells == [("none", "all")]


def test_curves_are_means_with_t_intervals(server):
    chart = server.json("en/curves?study=paper&group=mini+GPT%2Ftinystories&measurement=validation_loss")
    assert chart["steps"] == list(range(0, 401, 50))
    line = next(line for line in chart["lines"] if line["name"] == "oelm-freeze")
    seeds = [seed["values"] for seed in line["seeds"]]
    assert len(seeds) == 3
    for i, step in enumerate(chart["steps"]):
        values = [round(math.log(8) + 2 / (1 + step / 50) + seed * 0.01, 4) for seed in range(3)]
        assert [seed[i] for seed in seeds] == values
        low, high = stats.t.interval(0.95, 2, sum(values) / 3, stats.sem(values))
        assert (line["n"][i], line["mean"][i]) == (3, pytest.approx(sum(values) / 3, rel=1e-5))
        assert (line["low"][i], line["high"][i]) == (pytest.approx(low, 1e-5), pytest.approx(high, 1e-5))


@pytest.mark.parametrize("max_seeds", [0, 10])
def test_a_question_of_a_study_file_has_its_own_margin(tmp_path, max_seeds):
    """With a fixed number of seeds, and with seeds that `oelm decide` adds."""
    asked = (QuestionConfig("GPT-01", "non-inferior", 0.2),)
    for seed in range(4):
        config = lm_config(seed=seed)
        write_run(
            tmp_path, replace(config, compare=replace(config.compare, max_seeds=max_seeds)), 8 + seed / 50
        )
        config = lm_config("GPT-02", "oelm-freeze", seed=seed)
        compare = replace(config.compare, max_seeds=max_seeds, questions=asked)
        write_run(tmp_path, replace(config, compare=compare), 8.8 + seed / 45)
    with BoardServer(tmp_path) as server:
        page = server.page("en/study?name=paper")
        assert "at most 20 % worse?" in page
        assert "Questions: 1 decided, 0 undecided." in page
        address = "study=paper&kind=non-inferior&scale=mini&arm=GPT-02&reference=GPT-01&margins=20"
        page = server.page(f"en/question?{address}")
        assert re.findall(r'scope="row">n = (\d)', page) == [str(n) for n in range(1, 4 if max_seeds else 5)]
        chart = server.json(f"en/curves?{address}&measurement=validation_loss")
        assert [(line["name"], len(line["seeds"])) for line in chart["lines"]] == [
            ("baseline", 4),
            ("oelm-freeze", 4),
        ]


def test_a_diverged_seed_is_shown_but_is_not_in_the_mean(tmp_path):
    write_run(tmp_path, lm_config(seed=0))
    write_run(tmp_path, lm_config(seed=1), state="diverged")
    with BoardServer(tmp_path) as server:
        chart = server.json("en/curves?study=paper&group=mini+GPT%2Ftinystories&measurement=validation_loss")
        assert [seed["diverged"] for seed in chart["lines"][0]["seeds"]] == [False, True]
        assert set(chart["lines"][0]["n"]) == {1}
        assert "diverged" in server.page("en/")


def test_the_time_left_counts_runs_that_have_not_started():
    def run(state: str, status: Status | None) -> RunInfo:
        return RunInfo(RunFolder("x"), "s", "ID", "mini", 0, state=state, status=status)

    running = Status(step=300, total_steps=400, steps_per_second=10.0, eta_seconds=10.0)
    interrupted = Status(state="interrupted", step=200, total_steps=400)
    runs = [run("running", running), run("running", running)]
    _ = Translator("en")
    assert pages.time_left(runs, _) == "about 10.0 s left"
    runs += [run("pending", None), run("interrupted", interrupted)]
    assert pages.time_left(runs, _) == "about 40.0 s left"  # (10 + 10 + 40 + 20) / 2
    assert pages.time_left(runs[2:], _) == ""


def test_an_unchanged_page_is_not_sent_again(server):
    _status, headers, text = server.ask(f"/{TOKEN}/en/")
    assert text
    assert server.ask(f"/{TOKEN}/en/", **{"If-None-Match": headers["etag"]})[0] == 304


HOSTILE = "<script>window.hacked=1</script>\x1b[2J\u202e"


def test_hostile_text_stays_text(tmp_path):
    path = write_run(tmp_path, lm_config(), state="diverged")
    folder = RunFolder(path)
    folder.write_status(Status(state="diverged", reason=HOSTILE, host=HOSTILE))
    folder.log_file.write_text(HOSTILE, encoding="utf-8")
    named = tmp_path / "paper" / '"><img src=x onerror=hacked()>' / "scale=mini" / "seed=0"
    named.mkdir(parents=True)
    with BoardServer(tmp_path) as server:
        for page in (
            "en/",
            "en/study?name=paper",
            f"en/run?run={quote(path.relative_to(tmp_path).as_posix())}",
        ):
            text = server.page(page)
            assert "<script>window" not in text
            assert "<img" not in text
            assert not re.search("[\x1b\u202e]", text)
        assert "&lt;script&gt;window.hacked=1&lt;/script&gt;" in text


def test_an_empty_or_missing_folder_is_shown_as_such(tmp_path):
    with BoardServer(tmp_path / "none") as server:
        assert "no runs in this folder yet" in server.page("en/")


# -- how little is read again -----------------------------------------------------------------


class CountingReader(RunFolder):
    """Counts the bytes that are read from its files."""

    read_bytes = 0

    def open(self, name):
        file = super().open(name)
        reader, read = self, file.read

        class Counted:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def seek(self, *where):
                return file.seek(*where)

            def read(self, *size):
                content = read(*size)
                reader.read_bytes += len(content)
                return content

        return Counted()


def row(step: int, **values: float) -> str:
    return json.dumps({"step": step, "kind": "train", **values}) + "\n"


def test_only_appended_rows_are_read(tmp_path):
    reader, metrics = CountingReader(tmp_path), RunMetrics()
    reader.metrics_file.write_text("".join(row(s, loss=float(s)) for s in range(10_000)), encoding="utf-8")
    metrics.update(reader)
    assert len(metrics.columns["loss"]) == 10_000
    reader.read_bytes = 0
    with open(reader.metrics_file, "a", encoding="utf-8") as file:
        file.write(row(10_000, loss=7.0) + row(10_001, loss=8.0)[:-5])
    metrics.update(reader)
    assert reader.read_bytes < 1000
    assert metrics.columns["loss"][10_000] == 7.0
    assert 10_001 not in metrics.columns["loss"]  # not complete yet
    with open(reader.metrics_file, "a", encoding="utf-8") as file:
        file.write(row(10_001, loss=8.0)[-5:])
    metrics.update(reader)
    assert metrics.columns["loss"][10_001] == 8.0
    assert not metrics.problem


@pytest.mark.parametrize("later", [1, 50])
def test_a_resumed_run_cuts_its_file_back(tmp_path, later):
    """Also if the file has grown beyond its earlier length again before it is read."""
    reader, metrics = RunFolder(tmp_path), RunMetrics()
    reader.metrics_file.write_text("".join(row(s, loss=1.0) for s in range(10)), encoding="utf-8")
    metrics.update(reader)
    rows = [row(s, loss=1.0) for s in range(5)] + [row(s, loss=2.0) for s in range(5, 5 + later)]
    reader.metrics_file.write_text("".join(rows), encoding="utf-8")
    metrics.update(reader)
    assert metrics.columns["loss"] == {s: 1.0 if s < 5 else 2.0 for s in range(5 + later)}


def test_step_time_and_memory_are_curves(tmp_path):
    timer = Timer(tmp_path / "step_times.bin", torch.device("cpu"))
    for number in range(6):
        with timer.step(number):
            pass
        if number % 2:  # every second step is logged
            timer.record_memory(number)
    peak = timer.stats(6).peak_memory_bytes / 2**30
    metrics = RunMetrics()
    metrics.update(RunFolder(tmp_path))
    assert list(metrics.columns["step_time"]) == list(range(WARMUP_STEPS + 1, 7))
    assert list(metrics.columns["memory"]) == [2, 4, 6]
    assert 0 < metrics.columns["memory"][2] <= metrics.columns["memory"][6] <= peak
    (tmp_path / "step_memory.bin").unlink()  # a run folder may lack it
    metrics.update(RunFolder(tmp_path))
    assert set(metrics.columns) == {"step_time"}


def test_a_damaged_row_is_reported_and_the_rows_before_it_are_kept(tmp_path):
    reader, metrics = RunFolder(tmp_path), RunMetrics()
    reader.metrics_file.write_text(row(1, loss=1.0) + "{damaged\n", encoding="utf-8")
    metrics.update(reader)
    assert metrics.columns["loss"] == {1: 1.0}
    assert "metrics.jsonl" in metrics.problem


def test_a_second_scan_reads_no_run_that_has_ended(tmp_path, monkeypatch):
    paths = [write_run(tmp_path, lm_config(seed=seed)) for seed in range(3)]
    reads = []
    recorded = RunReader.recorded_status
    monkeypatch.setattr(RunReader, "recorded_status", lambda self: reads.append(self.path) or recorded(self))
    cache = ScanCache()
    first = scan(tmp_path, cache=cache)
    assert len(reads) == 3
    assert scan(tmp_path, cache=cache) == first
    assert len(reads) == 3
    RunFolder(paths[1]).write_status(Status(state="failed", reason="a disk was removed"))
    assert [run.state for run in scan(tmp_path, cache=cache)] == ["finished", "failed", "finished"]
    assert reads[3:] == [paths[1]]


def test_a_verdict_comes_in_with_its_seeds(tmp_path):
    def finish(seed: int) -> None:
        write_run(tmp_path, lm_config(seed=seed), 8.0 + 0.01 * seed)
        write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=seed), 8.05 + 0.012 * seed)

    finish(0)
    board = Board(tmp_path, planned())
    board.wait()
    assert [q.verdict.outcome for q in board.verdicts.questions] == ["no interval"]
    for seed in (1, 2):
        finish(seed)
    board._scanned = -math.inf
    board.wait()
    assert [q.verdict.outcome for q in board.verdicts.questions] == ["met"]


def test_questions_that_differ_only_in_their_margin_have_pages_of_their_own(tmp_path):
    asked = tuple(QuestionConfig("GPT-01", "non-inferior", margin) for margin in (0.01, 0.1))
    for seed in range(3):
        write_run(tmp_path, lm_config(seed=seed), 8.0 + 0.01 * seed)
        config = lm_config("GPT-02", "oelm-freeze", seed=seed)
        config = replace(config, compare=replace(config.compare, questions=asked))
        write_run(tmp_path, config, (8.0 + 0.01 * seed) * (1.05 + 0.0005 * seed))
    board = Board(tmp_path, planned())
    board.wait()
    found = {q.key()["margins"]: q.verdict.outcome for q in board.verdicts.questions}
    assert found == {"1": "missed", "10": "met"}


# -- the command ------------------------------------------------------------------------------


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    write_run(tmp_path, replace(lm_config(), study="mine"))
    command = [sys.executable, "-m", "oelm", "board", "--runs", str(tmp_path), "--port", "0", "--lang", "zh"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        port = address.split(":")[2].split("/")[0]
        assert f"ssh -L {port}:127.0.0.1:{port} " in process.stdout.readline()
        with urllib.request.urlopen(address, timeout=300) as answer:
            assert answer.url == address + "zh/"
            assert "mine" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        _out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert errors == ""


def test_the_vendored_chart_library_has_its_licence():
    static = Path(sys.modules["oelm.report.board.server"].__file__).parent / "static"
    assert "(v1.6.32)" in (static / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    assert "MIT License" in (static / "uPlot.LICENSE").read_text(encoding="utf-8")
