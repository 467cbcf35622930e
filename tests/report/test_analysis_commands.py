"""`oelm analyze` and `oelm report` as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from oelm.cli.main import main
from oelm.config.run_config import QuestionConfig
from run_factory import lm_config, write_run, write_study


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs"))


def test_analyze_prints_the_verdicts_first(runs, capsys):
    assert main(["analyze", "--runs", str(runs)]) == 0
    out = " ".join(capsys.readouterr().out.split())  # wrapped to the terminal
    assert out.startswith("Frozen arms against their baselines, 5 comparisons: ")
    assert (
        "oelm-freeze: perplexity +8.0 % against baseline (95 % confidence interval: +7.0 % to +9.0 %; n = 3)"
        in out
    )
    assert "Orthogonality or scale?" in out
    assert "Cost of each arm" not in out


def test_analyze_all_adds_costs_and_totals(runs, capsys):
    assert main(["analyze", "--all", "paper", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    for words in ("Where freezing works", "Cost of each arm", "not benchmarked", "24 finished", "48 min"):
        assert words in out


def test_analyze_omits_sections_without_content(tmp_path, capsys):
    write_run(tmp_path, lm_config("GPT-02", "oelm-freeze"))
    assert main(["analyze", "--runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out == "There is no finished comparison of a frozen arm with its baseline yet.\n"
    assert main(["analyze", "--all", "--runs", str(tmp_path)]) == 0
    titles = re.findall(r"^(.+)\n=+$", capsys.readouterr().out, flags=re.MULTILINE)
    assert titles == ["Cost of each arm", "Reported and reproduced", "Finished and pending"]


def test_analyze_json_has_n_and_intervals(runs, capsys):
    assert main(["analyze", "--json", "--runs", str(runs)]) == 0
    facts = json.loads(capsys.readouterr().out)
    freeze = next(c for c in facts["comparisons"] if c["id"] == "GPT-02" and c["kind"] == "baseline")
    assert freeze["ratio"]["n"] == 3
    low, high = freeze["ratio"]["interval"]
    assert low < freeze["ratio"]["value"] < high
    assert freeze["target"]["outcome"] == "missed"
    assert all(run.startswith(str(runs)) for run in freeze["runs"])


def test_analyze_names_a_broken_run_folder(tmp_path, capsys):
    folder = write_run(tmp_path, lm_config())
    (folder / "results.json").write_text("{", encoding="utf-8")
    assert main(["analyze", "--runs", str(tmp_path)]) == 0
    assert f"{folder}: results.json cannot be used" in capsys.readouterr().out


def test_a_note_on_two_questions_about_one_arm_names_the_question(tmp_path, capsys):
    asked = tuple(QuestionConfig(reference, "non-inferior", 0.1) for reference in ("GPT-01", "GPT-03"))
    for seed, extra in enumerate((0.1, 1.5, 0.3)):
        write_run(tmp_path, lm_config(seed=seed), 8.0)
        write_run(tmp_path, lm_config("GPT-03", "orthogonal-init", seed=seed), 8.4)
        config = lm_config("GPT-02", "oelm-freeze", seed=seed)
        write_run(tmp_path, replace(config, compare=replace(config.compare, questions=asked)), 8.0 + extra)
    assert main(["analyze", "--runs", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "Notes on these numbers: - oelm-freeze against baseline, oelm-freeze against orthogonal-init: " in out
    )


@pytest.mark.parametrize("command", ["analyze", "report"])
def test_a_missing_runs_folder_is_an_error_without_traceback(tmp_path, capsys, command):
    assert main([command, "--runs", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "does not exist; train something first" in error
    assert "Traceback" not in error


def test_report_prints_its_paths_last_and_checks_the_language(runs, tmp_path, capsys):
    html, markdown = tmp_path / "r.html", tmp_path / "r.md"
    words = ["report", "--runs", str(runs), "-o", str(html), "--markdown", str(markdown), "--lang", "zh"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(html), str(markdown)]
    text = html.read_text(encoding="utf-8")
    assert '<html lang="zh-CN">' in text
    assert "--lang zh" in text  # the command that makes it again
    assert main(["report", "--runs", str(runs), "--lang", "de"]) == 2
    assert "unknown --lang 'de'" in capsys.readouterr().err


def test_the_report_of_a_phase_has_settings_runs_verdicts_and_reported_figures(runs, tmp_path, capsys):
    page, summary = tmp_path / "REPORT.md", tmp_path / "summary.md"
    words = ["report", "--runs", str(runs), "--phase", "3", "--markdown", str(page)]
    assert main([*words, "--summary", str(summary)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(page), str(summary)]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Report of phase 3")
    titles = ("Settings", "Verdicts", "Every arm against its baseline", "Reported and reproduced", "Runs")
    assert [title for title in titles if f"## {title}\n" not in text] == []
    assert "| GPT-02 |" in text  # the report of phase 3 covers all seven GPT runs
    for target in set(re.findall(r"\]\(#([^)]+)\)", text)):
        assert f'<a id="{target}"></a>' in text
    text = summary.read_text(encoding="utf-8")
    assert "## Phase 2: GPT language modelling on TinyStories" in text
    assert "](#" not in text  # the page has no list of runs to link to
    assert main([*words, "--lang", "zh", "--summary", str(summary)]) == 0
    assert page.read_text(encoding="utf-8").startswith("# 阶段 3 报告")
    assert "## 阶段 2：GPT 语言建模：TinyStories" in summary.read_text(encoding="utf-8")


def test_the_claims_page_is_written_without_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "claims.md"
    page.write_text("kept")
    assert main(["report", "--claims", str(page), "--runs", "typo"]) == 2
    assert page.read_text() == "kept"
    assert main(["report", "--claims", str(page)]) == 0
    assert "44,896,768" in page.read_text(encoding="utf-8")


def test_help_of_the_commands_imports_no_heavy_package():
    code = (
        "import sys; from oelm.cli.main import make_app\n"
        "for c in ('analyze', 'report', 'demo'): make_app().parse_args([c])\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'scipy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)
