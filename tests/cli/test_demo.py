"""The short result that `oelm demo` prints; tests/test_wheel.py runs a whole demo."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oelm.analysis.statistics.intervals import difference
from oelm.analysis.verdict import ACCURACY_SIGN, ACCURACY_TARGET, PPL_SIGN, PPL_TARGET, decide
from oelm.cli.demo import short_result
from oelm.methods.presets import find_method


def language_model(ratios: list[float], method: str = "oelm-freeze", kind: str = "baseline") -> Any:
    effect = difference(
        {s: math.log(r) for s, r in enumerate(ratios)}, dict.fromkeys(range(len(ratios)), 0.0)
    )
    config = SimpleNamespace(task="lm")
    arm = SimpleNamespace(method=find_method(method), config=config, key=method)
    verdicts = {"target": decide(PPL_TARGET, effect), "sign": decide(PPL_SIGN, effect)}
    return SimpleNamespace(arm=arm, metric="ppl", effect=effect, kind=kind, **verdicts)


def test_a_diverged_run_does_not_ask_for_more_seeds() -> None:
    c = language_model([1.1, 1.2])
    c.target = decide(PPL_TARGET, c.effect, withhold="diverged")
    assert any("no verdict, the details say why" in line for line in lines(c))


def lines(*comparisons: Any) -> list[str]:
    found = SimpleNamespace(of=lambda kind: [c for c in comparisons if kind == c.kind])
    return list(short_result(SimpleNamespace(comparisons=found)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratios", "decision"),
    [
        ([1.020, 1.021, 1.019], ": at most 5 % worse"),
        ([0.980, 0.981, 0.979], ": better"),
        ([1.140, 1.141, 1.139], ": more than 5 % worse"),
        ([1.02, 1.09, 1.04], "undecided, more seeds"),
        ([1.02], "undecided, more than one seed"),
    ],
)
def test_one_line_has_the_cost_its_interval_and_the_decision(ratios: list[float], decision: str) -> None:
    compared, result, rates = lines(language_model(ratios), language_model([2.0, 2.1, 2.2], "oelm-lowrank"))
    assert compared.startswith("Change against the baseline, which trains query/key projections")
    assert "learning rate; it was not tuned for each arm" in rates
    assert result.startswith("  oelm-freeze, language model: perplexity ")
    assert f"n = {len(ratios)}" in result
    assert (" % to " in result) == (len(ratios) > 1)
    assert decision in result


def test_a_method_with_extras_is_also_compared_with_its_control() -> None:
    """Otherwise a gain of the extras would look like a gain of freezing."""
    frozen, biases = language_model([1.2, 1.21]), language_model([0.95, 0.94], "oelm-bias")
    control = language_model([1.03, 1.02], "oelm-bias", "control")
    _, first, second, third, fourth, _ = lines(biases, control, frozen)
    assert first.startswith("  oelm-freeze, language model: perplexity +2")
    assert second.startswith("  oelm-bias, language model: perplexity −5")
    assert third == "Against the same additions with trained projections:"
    assert fourth.startswith("  oelm-bias: perplexity +2.5 % (")
    assert fourth.endswith("n = 2): undecided, more seeds are needed")


def test_a_difference_of_accuracy_is_in_points() -> None:
    effect = difference({0: 80.0, 1: 81.0, 2: 80.5}, {0: 80.5, 1: 81.4, 2: 81.1})
    arm = SimpleNamespace(
        method=find_method("oelm-freeze"), config=SimpleNamespace(task="classification"), key="arm"
    )
    target = decide(ACCURACY_TARGET, difference({0: -0.01, 1: -0.012}, {0: 0.0, 1: 0.0}))
    sign = decide(ACCURACY_SIGN, effect)
    (_, result, _) = lines(
        SimpleNamespace(arm=arm, metric="accuracy", effect=effect, target=target, sign=sign, kind="baseline")
    )
    assert result.startswith("  oelm-freeze, classifier: accuracy −0.50 points (−")


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_output_in_the_readme_has_the_wording_of_the_demo(page: str) -> None:
    shown = Path(__file__).parents[2].joinpath(page).read_text(encoding="utf-8").splitlines()
    biases = language_model([1.03, 1.02], "oelm-bias"), language_model([1.03, 1.02], "oelm-bias", "control")
    for line in lines(*biases):
        assert line.startswith("  ") or line in shown


def test_without_finished_runs_there_is_no_comparison() -> None:
    (line,) = lines()
    assert "No comparison yet" in line
