"""The claims page: its figures are computed, and the committed page is current."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oelm.report.sections import arithmetic
from oelm.report.sections.claims import NO_RUNS, claims, claims_page
from run_factory import analyze, write_study


def test_parameter_counts_are_those_of_the_architecture():
    shape = arithmetic.GPTShape()
    assert (shape.parameters, shape.qk) == (44_896_768, 3_145_728)
    assert arithmetic.BERT_FROZEN == 14_174_208
    assert round(shape.checkpoint_bytes / arithmetic.MIB) == 514
    assert round(shape.frozen_checkpoint_bytes / arithmetic.MIB) == 490


def test_bounds_and_norms():
    assert arithmetic.weight_gradient_bound() == pytest.approx(4 / 72)
    assert arithmetic.row_norm(1 / math.sqrt(512), 512) == pytest.approx(1)
    assert arithmetic.logit_ratio(0.02, 512) == pytest.approx(4.88, abs=0.01)
    assert arithmetic.epochs(100_000, 8, 512, 99e6) == pytest.approx(4.137, abs=0.001)


def test_without_runs_the_page_says_that_there_are_none():
    page = claims_page(None, "oelm report --claims FILE")
    assert page.count(NO_RUNS) == sum(c.results is not None for c in claims(None))
    for figure in (
        "44,896,768",
        "3,145,728",
        "7.0 %",
        "5.6 %",
        "0.45",
        "5 h 07 min",
        "0.33 s",
        "+9.8 %",
        "2,119,719",
    ):
        assert figure in page


def test_our_results_are_apart_from_the_reported_ones(tmp_path):
    page = claims_page(analyze(write_study(tmp_path)), "x")
    section = page.partition("## 4. ")[2].partition("## 5. ")[0]
    reported, _, ours = section.partition("**Our runs.**")
    assert "4.69 against 4.97" in reported
    assert "against oelm-random-matched" in ours
    assert "4.69" not in ours


def test_the_committed_page_has_every_claim():
    page = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
    for claim in claims(None):
        assert f". {claim.title}\n" in page
        for line in claim.checks:
            assert line in page


def test_the_original_study_is_quoted_exactly():
    page = claims_page(None, "oelm report")
    assert '4.69 against 4.97, "6.0 % better"' in page
    assert "4.97 is 6.0 % above 4.69; as a reduction, 4.69 is 5.6 % below 4.97" in page
    assert "OpenWebText 40M" in page
    assert "OpenWebText as reported: about 40M tokens, 10.2 passes" in page
    assert "OpenWebText as in the files of the public scripts: about 99M tokens, 4.1 passes" in page
    for trouble in ("label of -1", "89 %", "restarted the epoch"):
        assert trouble in page
