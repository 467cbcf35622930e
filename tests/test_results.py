"""The committed results and the pages made from them are one: nothing in a page is written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.analysis.analyze import Analysis, analyze
from oelm.analysis.load import FINISHED
from oelm.cli.analyze import BENCHMARKS
from oelm.experiments.catalogue import planned_configs
from oelm.report.claims import claims_page
from oelm.report.document import Figure
from oelm.report.figures import standalone
from oelm.report.markdown import to_markdown
from oelm.report.report import build

ROOT = Path(__file__).parents[1]
RESULTS = "results"


@pytest.fixture(scope="module")
def committed() -> Analysis:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return analyze(RESULTS, benchmarks=BENCHMARKS, planned=planned_configs())


def test_every_result_can_be_read_and_none_holds_weights_or_a_path_of_a_machine(committed: Analysis) -> None:
    assert committed.states[FINISHED] == len(committed.loaded.runs) > 0
    assert committed.warnings == []
    for path in (p for p in (ROOT / RESULTS).rglob("*") if p.is_file()):
        assert path.suffix in (".json", ".jsonl", ".yaml"), path
        assert path.stat().st_size < 300_000, path
        if path.name in ("manifest.json", "status.json"):
            text = path.read_text(encoding="utf-8")
            assert '"/' not in text, path
            assert '"host"' not in text, path


def test_pages_are_made_from_the_results(committed: Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = Path("docs/results.md")
    command = f"oelm report --runs {RESULTS} --markdown {page}"
    document = build(committed, page.parent, command=command)
    made = to_markdown(document, f"{page.stem}_figures")
    assert made == page.read_text(encoding="utf-8"), "run `make documents`"
    drawn = {b.name: b.svg for section in document.sections for b in section.blocks if isinstance(b, Figure)}
    kept = {p.stem: p.read_text(encoding="utf-8") for p in Path("docs/results_figures").iterdir()}
    assert kept == {name: standalone(svg) for name, svg in drawn.items()}, "run `make documents`"
    claims = claims_page(committed, f"oelm report --runs {RESULTS} --claims docs/claims.md")
    assert claims == Path("docs/claims.md").read_text(encoding="utf-8"), "run `make documents`"
