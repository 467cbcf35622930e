"""Every kind of benchmark runs end to end at a tiny size, and its arithmetic is right. Never a clock."""

import json
from pathlib import Path

import numpy as np
import pytest

from oelm.bench import classification, growth
from oelm.bench.classification import ClassificationBench
from oelm.bench.classification_arms import spread
from oelm.bench.folders import FoldersBench, clone
from oelm.bench.folders import summarise as summarise_folders
from oelm.bench.goals import Judged, judge
from oelm.bench.growth import GrowthBench, exponent
from oelm.bench.interleave import ratio
from oelm.bench.step import StepBench
from oelm.bench.step import run as run_step
from oelm.bench.table import make
from oelm.cli.main import main
from oelm.errors import OelmError, UsageError
from oelm.runs.folder import RunFolder

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def arm(seconds, samples):
    facts = {"samples": samples, "tokens_per_sample": 50.0, "padding_share": 0.1, "origin": "here"}
    return {"seconds": seconds, "cpu_seconds": seconds, "facts": facts, "memory": {"peak_bytes": 1}}


def test_samples_per_second_count_all_work_of_unlike_rounds():
    measured = {"oelm": arm([1.0, 3.0], samples=100), "trainer": arm([2.0, 4.0], samples=50)}
    ours, theirs = classification.summarise(measured, ("oelm", "trainer"))["arms"]
    assert ours["samples_per_second"] == pytest.approx(200 / 4)
    assert theirs["samples_per_second"] == pytest.approx(100 / 6)
    assert theirs["speedup_of_ours"]["value"] == pytest.approx(3.0)
    assert theirs["samples"] == 100


def test_every_turn_has_short_and_long_batches_in_the_epochs_proportion():
    longest = np.random.default_rng(0).integers(10, 500, 313)
    turns = spread(longest, turns=8, steps=6)
    assert [len(turn) for turn in turns] == [6] * 8
    chosen = [number for turn in turns for number in turn]
    assert len(set(chosen)) == 48
    means = [longest[turn].mean() for turn in turns]
    assert np.ptp(means) < 0.1 * longest.mean()
    assert longest[chosen].mean() == pytest.approx(longest.mean(), rel=0.03)


def test_few_batches_are_used_again():
    assert sorted(n for turn in spread(np.array([3, 1, 2]), turns=3, steps=2) for n in turn) == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def kept(kind):
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["kind"] == kind:
            yield result


def test_kept_ratios_follow_from_the_kept_seconds():
    pairs = []
    for result in kept("step"):
        first = result["arms"][0]
        for arm in result["arms"]:
            pairs.append((arm["ratio"], ratio(arm["seconds"], first["seconds"])))
            pairs.append((arm["cpu_ratio"], ratio(arm["cpu_seconds"], first["cpu_seconds"])))
    for comparison in (c for result in kept("classification") for c in result["comparisons"]):
        each = {
            clock: {a["name"]: np.array(a[clock]) * len(a[clock]) / a["samples"] for a in comparison["arms"]}
            for clock in ("seconds", "cpu_seconds")
        }
        for arm in comparison["arms"]:
            for clock, key in (("seconds", "speedup_of_ours"), ("cpu_seconds", "speedup_of_ours_cpu")):
                pairs.append((arm[key], ratio(each[clock][arm["name"]], each[clock]["oelm"], of="mean")))
    for comparison in (c for result in kept("tokenisation") for c in result["comparisons"]):
        seconds = comparison["seconds"]
        for name, found in comparison["ratio_to_ours"].items():
            pairs.append((found, ratio(seconds[name], seconds["oelm"])))
    assert len(pairs) > 50
    for held, computed in pairs:
        value = held.get("value", held.get("median"))
        figures = (value, held["low"], held["high"], held["rounds"])
        assert figures == pytest.approx((computed.median, computed.low, computed.high, computed.rounds))


@pytest.mark.slow
def test_all_ways_to_classify_run_on_stand_ins(tmp_path):
    bench = ClassificationBench(
        datasets=("mnli",),
        model="tiny-bert",
        rows=4,
        steps=2,
        rounds=3,
        train_rows=64,
        threads=1,
        cache_dir=str(tmp_path),
    )
    result = classification.run(bench)
    for comparison in result["comparisons"]:
        ours, padded, theirs = comparison["arms"]
        assert ours["samples"] == theirs["samples"] == 24
        assert padded["samples"] == 12
        assert padded["padding_share"] > 0.5 > ours["padding_share"]
        assert all(len(a["seconds"]) == 3 for a in comparison["arms"])
    assert "data_dir" not in result["settings"]
    assert len(result["load"]["before"]) == 3


def test_classification_needs_our_arm_first():
    with pytest.raises(UsageError, match="first arm"):
        ClassificationBench(arms=("trainer", "oelm"))
    with pytest.raises(UsageError, match="did you mean 'trainer'"):
        ClassificationBench(arms=("oelm", "trainr"))


@pytest.mark.slow
def test_frozen_arms_of_an_encoder_hold_less_and_say_what_they_save():
    bench = StepBench(
        arms=("baseline", "freeze-pretrained"),
        size="tiny-bert",
        vocabulary=61,
        context=16,
        batch=2,
        rounds=3,
        warmup=1,
        threads=1,
    )
    result = run_step(bench)
    base, frozen = result["arms"]
    assert frozen["trainable"] == base["trainable"] - 2 * 2 * (32 * 32 + 32)
    assert frozen["memory"]["gradient_bytes"] == 4 * frozen["trainable"]
    assert frozen["memory"]["optimizer_bytes"] < base["memory"]["optimizer_bytes"]
    assert frozen["saving"]["predicted"] == pytest.approx(1 - frozen["flops_ratio"])
    expected = (1 - frozen["ratio"]["value"]) / frozen["saving"]["predicted"]
    assert frozen["saving"]["realised"] == pytest.approx(expected)


def test_peers_are_of_the_gpt_alone():
    with pytest.raises(UsageError, match="peer 'plain'"):
        StepBench(arms=("baseline", "plain"), size="minilm")
    with pytest.raises(UsageError, match="did you mean 'oelm-plus'"):
        StepBench(arms=("baseline", "oelm-plsu"))


@pytest.mark.slow
def test_growth_is_measured_along_each_axis():
    result = growth.run(GrowthBench(axes=("depth",), shrink=4, rounds=3, threads=1))
    depth = result["axes"]["depth"]
    assert depth["values"] == [1, 2, 4]  # 2 // 4 and 4 // 4 are one point
    assert depth["flops"] == sorted(depth["flops"])
    assert 0 < depth["exponents"]["flops"] <= 1
    assert min(depth["memory_bytes"]) > 0


def test_an_exponent_is_the_slope_of_logarithms():
    x = np.array([128, 256, 512, 1024])
    assert exponent(x, 7 * x**1.7) == pytest.approx(1.7)


@pytest.mark.slow
def test_clones_of_a_run_are_runs_to_status_and_analyze(tmp_path, capsys):
    origin, place = tmp_path / "origin", tmp_path / "clones"
    assert (
        main(["train", "GPT-01", "--scale", "smoke", "--runs", str(origin), "--set", "budget.steps=4"]) == 0
    )
    clone(origin, place, 3)
    capsys.readouterr()
    assert main(["status", "--runs", str(place), "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)] == ["finished"] * 3
    folders = [RunFolder(path.parent) for path in place.rglob("results.json")]
    assert sorted(folder.config().seed for folder in folders) == [0, 1, 2]
    assert not list(place.rglob("*.pt"))
    assert main(["analyze", "--runs", str(place)]) == 0


def test_folder_times_are_fitted_beyond_the_first():
    bench = FoldersBench(counts=(1, 10, 100))
    found = summarise_folders(bench, {"status": [[1.0, 1.2], [1.1], [2.0]]})["status"]
    assert found["best_seconds"] == [1.0, 1.1, 2.0]
    assert found["exponent"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (1.3, 1.25, 1.4, "met"),
        (1.3, 1.1, 1.4, "met, but not by the whole interval"),
        (1.1, 1.0, 1.15, "missed"),
        (1.1, 1.0, 1.3, "missed, but not by the whole interval"),
        (1.2, None, None, "met"),
    ],
)
def test_a_goal_is_met_by_its_whole_interval_or_says_so(value, low, high, verdict):
    assert Judged("goal", 1.2, True, value, low, high).verdict == verdict
    flipped = [None if v is None else -v for v in (value, high, low)]
    assert Judged("goal", -1.2, False, *flipped).verdict == verdict


def test_goals_are_judged_from_the_file_alone():
    r = {"value": 1.5, "low": 1.45, "high": 1.6, "rounds": 5}
    base = {"name": "baseline", "ratio": {**r, "value": 1.0}, "gemm_peak_share": 0.8}
    plain = {"name": "plain", "ratio": r, "memory_ratio": 2.0}
    slow = {"name": "oelm-plus", "fields": {"freeze": "all"}, "ratio": {**r, "low": 0.9}}  # saves none
    result = {"kind": "step", "model": "medium-512", "settings": {}, "arms": [base, plain, slow]}
    found = {j.goal: j for j in judge([result, {"kind": "growth"}])}
    assert found["medium-512: a step against plain"].verdict == "met"
    assert found["medium-512: share of the GEMM peak"].verdict == "met"
    assert found["medium-512: peak memory against plain"].value == 0.5
    late = found["medium-512: oelm-plus takes no longer than baseline"]
    assert late.verdict == "missed, but not by the whole interval"


@pytest.mark.slow
def test_the_document_is_made_from_results(tmp_path):
    results = tmp_path / "results"
    words = ["--rounds", "3", "--warmup", "0", "--threads", "1"]
    tiny = ["--size", "smoke", "--vocabulary", "61", "--context", "16", "--batch", "2"]
    step = ["bench", "step", "--arms", "baseline", "oelm-freeze", *tiny, *words]
    assert main([*step, "-o", str(results / "step.json")]) == 0
    quick = ["bench", "growth", "--axes", "depth", "--shrink", "4", *words]
    assert main([*quick, "-o", str(results / "growth.json")]) == 0
    document = tmp_path / "docs" / "performance.md"
    assert main(["bench", "table", "--results", str(results), "-o", str(document)]) == 0
    text = document.read_text()
    measured = json.loads((results / "step.json").read_text())
    assert f"{measured['arms'][1]['ratio']['value']:.3f} [" in text
    assert "oelm-freeze takes no longer than baseline" in text
    assert measured["machine"]["cpu"] in text
    first = (tmp_path / "docs" / "growth.svg").read_bytes()
    make(results, document)
    assert (tmp_path / "docs" / "growth.svg").read_bytes() == first
    assert document.read_text() == text


def test_no_results_is_said(tmp_path):
    with pytest.raises(OelmError, match="no results"):
        make(tmp_path, tmp_path / "performance.md")
