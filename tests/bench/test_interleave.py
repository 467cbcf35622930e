"""Ratios computed right, arms that really run, and errors that name what is wrong. Never a clock."""

import numpy as np
import pytest

from oelm.bench.interleave import interleave, ratio
from oelm.bench.step import StepBench, run, summarise
from oelm.bench.tokenisation import TokenisationBench
from oelm.errors import OelmError, UsageError

TINY = {"size": "smoke", "vocabulary": 61, "context": 16, "batch": 2}


def test_a_ratio_is_that_of_medians_with_an_interval_around_it():
    draw = np.random.default_rng(1)
    ours = draw.normal(1.0, 0.05, 40)
    theirs = 1.5 * draw.normal(1.0, 0.05, 40)
    found = ratio(theirs, ours)
    assert found.median == np.median(theirs) / np.median(ours)
    assert found.low < 1.5 < found.high
    assert found.rounds == 40


def test_noise_common_to_a_round_cancels():
    slow = np.array([1.0, 3.0, 9.0, 2.0, 5.0])  # the machine, not the arms
    found = ratio(2 * slow, slow)
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


def test_series_of_different_length_are_refused():
    with pytest.raises(ValueError, match="one value per round"):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize("rounds", [3, 4, 8, 10, 15])
def test_the_coverage_of_the_interval_is_what_it_says(rounds):
    draw = np.random.default_rng(2)
    inside = 0
    for _ in range(200):
        a, b = draw.lognormal(0.0, 0.1, (2, rounds))
        found = ratio(1.2 * a, b, draws=500)
        inside += found.low <= 1.2 <= found.high
    assert inside / 200 > 0.88  # Student's t of few, a percentile bootstrap of medians from 10 on


def measured(seconds, flops=None, peak=100):
    facts = {"tokens": 64, "parameters": 10, "trainable": 8}
    if flops:
        facts["flops"] = flops
    return {"seconds": seconds, "cpu_seconds": seconds, "facts": facts, "memory": {"peak_bytes": peak}}


def test_the_summary_is_plain_arithmetic():
    raw = {
        "gemm": {"seconds": [2.0, 2.0, 2.0], "facts": {"flops": 400.0}, "memory": {}},
        "baseline": measured([1.0, 1.0, 1.0], flops=150.0),
        "oelm-freeze": measured([0.9, 0.9, 0.9], flops=120.0, peak=90),
        "oelm-freeze-compiled": measured([0.8, 0.8, 0.8], flops=120.0),
        "plain": measured([1.5, 1.5, 1.5], peak=200),
    }
    found = summarise(raw, ["baseline", "oelm-freeze", "oelm-freeze-compiled", "plain"])
    base, frozen, compiled, plain = found["arms"]
    assert found["gemm_peak_flops"] == 200.0
    assert base["gemm_peak_share"] == 0.75
    assert frozen["flops_ratio"] == 0.8
    assert frozen["ratio"]["value"] == pytest.approx(0.9)
    assert frozen["fields"]["freeze"] == "all"
    assert compiled["ratio"]["value"] == pytest.approx(0.8)
    assert "saving" not in compiled  # what compiling brings is not what freezing saves
    assert not compiled["fields"]  # no report takes it for the step of the method
    assert plain["memory_ratio"] == 2.0
    assert plain["tokens_per_second"] == pytest.approx(64 / 1.5)
    assert "gemm_peak_share" not in plain


@pytest.mark.slow
def test_every_kind_of_arm_runs():
    arms = ("baseline", "oelm-plus", "plain", "transformers", "trainer")
    result = run(StepBench(arms=arms, **TINY, rounds=3, warmup=1, threads=1))
    assert [arm["name"] for arm in result["arms"]] == list(arms)
    assert all(len(arm["seconds"]) == 3 and min(arm["seconds"]) > 0 for arm in result["arms"])
    base, plus, plain, theirs, _ = result["arms"]
    assert base["parameters"] == plain["parameters"]
    assert plus["trainable"] < plus["parameters"]
    # GPT-2 has the biases of Q/K/V/O that ours lacks: 4 x 32 in each of 2 layers
    assert theirs["parameters"] == base["parameters"] + 2 * 4 * 32
    assert plus["memory"]["gradient_bytes"] == 4 * plus["trainable"]
    assert plus["memory"]["optimizer_bytes"] >= 8 * plus["trainable"]


def test_an_arm_that_dies_is_named():
    with pytest.raises(OelmError, match="'baseline' died"):
        interleave(
            [{"kind": "step", "arm": "baseline", "size": "no-such-size"}], rounds=3, warmup=0, threads=1
        )


def test_a_compiled_arm_is_its_method():
    specs = StepBench(arms=("baseline", "oelm-freeze-compiled")).specs()
    assert [(s["arm"], s["method"]) for s in specs[1:]] == [
        ("baseline", "baseline"),
        ("oelm-freeze-compiled", "oelm-freeze"),
    ]


def test_wrong_arms_are_refused():
    with pytest.raises(UsageError, match="did you mean 'plain'"):
        StepBench(arms=("baseline", "plane"))
    with pytest.raises(UsageError, match="different arms"):
        StepBench(arms=("baseline", "baseline"))
    with pytest.raises(UsageError, match="3 rounds"):
        StepBench(rounds=1)
    with pytest.raises(UsageError, match="3 rounds"):
        TokenisationBench(rounds=1)
