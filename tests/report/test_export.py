"""CSV and LaTeX: the numbers of the report, and no text that becomes a formula or a command."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from oelm.cli.main import main
from oelm.report.document import Row, Table
from oelm.report.formats.export import CSV_COLUMNS, to_latex, write_csv
from run_factory import analyze, lm_config, write_run, write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("runs"))


def test_report_writes_tables_as_csv_and_latex(study, tmp_path, capsys):
    table, folder = tmp_path / "comparisons.csv", tmp_path / "tables"
    assert main(["report", "--runs", str(study), "--csv", str(table), "--latex", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(table)
    assert not (tmp_path / "report.html").exists()
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(analyze(study).comparisons.made)
    freeze = next(r for r in rows if r["id"] == "GPT-02" and r["kind"] == "baseline")
    assert (freeze["unit"], freeze["n"], freeze["verdict"]) == ("%", "3", "missed")
    assert freeze["n_reference"] == "3"
    low, change, high = (float(freeze[name]) for name in ("low", "change", "high"))
    assert low < 7.9 < change < 8.1 < high
    assert {path.suffix for path in folder.iterdir()} == {".tex", ".pdf", ".png"}
    tex = (folder / "comparisons-1.tex").read_text(encoding="utf-8")
    assert r"oelm-freeze & misses 5 \% & 8.657 & +8.0 \% & +7.0 \% to +9.0 \% & 3 \\" in tex


def test_names_become_neither_formulas_nor_latex_commands(tmp_path):
    name = "=HYPERLINK(1)\\input{x}%\x1b"
    for id, arm in (("GPT-01", "baseline"), ("GPT-02", name)):
        for seed in range(2):
            config = lm_config(id, "oelm-freeze" if id == "GPT-02" else arm, seed=seed)
            write_run(tmp_path, replace(config, compare=replace(config.compare, arm=arm)), 8 + seed / 10)
    path = write_csv(analyze(tmp_path), tmp_path / "comparisons.csv")
    text = path.read_text(encoding="utf-8")
    assert ",'=HYPERLINK(1)" in text
    assert "\x1b" not in text
    tex = to_latex(Table(("Arm",), (Row((name,)),)), name, "arm")
    assert tex.count(r"=HYPERLINK(1)\textbackslash{}input\{x\}\%") == 2  # in the caption and in the table


def test_a_long_table_becomes_several_that_fit_on_a_page():
    tex = to_latex(Table(("Arm",), tuple(Row((f"arm{i}",)) for i in range(98))), "Costs", "costs-1")
    parts = tex.split("\\end{table*}\n")[:-1]
    assert [part.count("arm") for part in parts] == [40, 40, 18]
    assert r"\caption{Costs (3/3)}\label{tab:costs-1-3}" in parts[2]
    assert all(part.count("{adjustbox}") == 2 for part in parts)


def test_csv_of_an_analysis_without_comparisons_has_only_its_header(tmp_path):
    (tmp_path / "runs").mkdir()
    path = write_csv(analyze(tmp_path / "runs"), tmp_path / "comparisons.csv")
    (header,) = path.read_text(encoding="utf-8").splitlines()
    assert header.split(",") == list(CSV_COLUMNS)
