"""The benchmark harness: its statistics, its processes, and what `oelm bench` measures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from oelm.bench import methods, worker
from oelm.bench.harness import Measured, Plan, measure_alone, measure_together, ratio
from oelm.errors import OelmError, UsageError

PLAN = Plan(processes=3, rounds=2, steps=2, warmup=1, threads=1)


@pytest.fixture(autouse=True)
def arms_of_this_folder(monkeypatch):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)


def sleeping(arm, seconds, **more):
    return {"arm": arm, "build": "sleeping_arm:build", "seconds": seconds, **more}


def test_interval_is_students_t_over_processes():
    draw = np.random.default_rng(0)
    arm, reference = draw.uniform(1, 2, (5, 4)), draw.uniform(1, 2, (5, 4))
    found = ratio(arm.tolist(), reference.tolist())
    logs = np.log(arm / reference).mean(axis=1)
    low, high = stats.t.interval(0.95, 4, logs.mean(), stats.sem(logs))
    assert (found.value, found.low, found.high) == pytest.approx(np.exp([logs.mean(), low, high]))


def test_rounds_of_one_process_do_not_narrow_the_interval():
    process_means = [[1.0], [1.1], [1.2]]
    many_rounds = [turns * 50 for turns in process_means]
    few = ratio(process_means, [[1.0]] * 3)
    many = ratio(many_rounds, [[1.0] * 50] * 3)
    assert (many.low, many.high) == pytest.approx((few.low, few.high))


def test_two_processes_per_arm_are_refused():
    with pytest.raises(UsageError, match="needs at least 3"):
        Plan(processes=2)


def test_turns_of_several_steps_without_the_first_one():
    found = measure_together([sleeping("a", 0.001), sleeping("b", 0.002, own_loop=True)], PLAN)
    for arm in ("a", "b"):
        assert np.shape(found[arm].steps) == (PLAN.processes, PLAN.rounds, PLAN.steps)
        assert found[arm].facts == {"name": arm}
        assert found[arm].memory["steps"] == PLAN.warmup + PLAN.rounds * (PLAN.steps + 1)
        assert found[arm].memory["peak_bytes"] > 1_000_000
    assert min(t for turns in found["b"].steps for turn in turns for t in turn) >= 0.002


def test_arms_measured_alone_have_the_same_shape():
    found = measure_alone([sleeping("a", 0.0), sleeping("b", 0.0)], PLAN)
    assert list(found) == ["a", "b"]
    for arm in found.values():
        assert np.shape(arm.steps) == np.shape(arm.reference) == (3, 2, 2)
        assert np.min(arm.reference) > 0


def test_a_reference_computation_removes_the_drift_of_the_machine():
    speeds = np.array([1.0, 0.5, 2.0])[:, None, None]  # of the machine while each process runs
    ours = Measured((4.0 / speeds).tolist(), {}, {}, (0.2 / speeds).tolist())
    peer = Measured((6.0 / speeds[::-1]).tolist(), {}, {}, (0.2 / speeds[::-1]).tolist())
    found = ratio(peer.rounds, ours.rounds)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_an_arm_that_dies_is_named_with_its_exit_code():
    with pytest.raises(OelmError, match="arm 'broken' ended with exit code 3"):
        measure_together([sleeping("fine", 0.0), sleeping("broken", 0.0, dies=True)], PLAN)


def tiny_spec(arm="baseline", size="smoke", **more):
    work = methods.Workload(size, vocabulary=64, context=8, batch=2)
    bench = methods.MethodsBench(("baseline", "oelm-freeze"), work)
    return {**next(spec for spec in bench.specs() if spec["arm"] == arm), **more}


@pytest.mark.parametrize("size", ["smoke", "tiny-bert"])
def test_a_frozen_arm_trains_and_keeps_no_state_for_q_and_k(size):
    trained, frozen = (methods.build(tiny_spec(arm, size)) for arm in ("baseline", "oelm-freeze"))
    for arm in (trained, frozen):
        arm.step()
    assert frozen.facts["trainable"] < trained.facts["trainable"] == trained.facts["parameters"]
    assert frozen.facts["flops"] < trained.facts["flops"]
    for held in ("gradient_bytes", "optimizer_bytes"):
        assert frozen.memory()[held] < trained.memory()[held]
    assert frozen.memory()["gradient_bytes"] == 4 * frozen.facts["trainable"]


def test_unknown_or_repeated_methods_are_refused():
    with pytest.raises(UsageError, match="oelm-freeze"):
        methods.MethodsBench(("baseline", "oelm-freze"))
    with pytest.raises(UsageError, match="none of them twice"):
        methods.MethodsBench(("baseline", "baseline"))
    with pytest.raises(UsageError, match="first method must be 'baseline'"):
        methods.MethodsBench(("oelm-freeze",))


def test_a_method_that_unfreezes_during_training_cannot_be_measured_by_single_steps():
    with pytest.raises(UsageError, match="oelm-gradual cannot be measured by single steps"):
        methods.MethodsBench(("baseline", "oelm-gradual"))


def test_bench_command_prints_ratios_and_writes_json(tmp_path, monkeypatch, capsys):
    from oelm.cli.main import main

    def measured(specs, plan, progress):
        found = {}
        for number, spec in enumerate(specs):
            arm = methods.build(spec)
            found[spec["arm"]] = Measured(
                [[[1.0 + number] * 2] * 2] * 3, arm.facts, [{"peak_bytes": 1 << 20, **arm.memory()}]
            )
        return found

    monkeypatch.setattr(methods, "measure_together", measured)
    monkeypatch.setattr(worker, "GEMM_SIZE", 8)
    words = "bench --size smoke --vocabulary 64 --context 8 --batch 2 --methods baseline oelm-freeze -o"
    assert main([*words.split(), str(tmp_path / "bench.json")]) == 0
    printed = capsys.readouterr().out
    assert "baseline (again)" in printed
    assert "1.500 [1.500, 1.500]" in printed
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["kind"] == "step"
