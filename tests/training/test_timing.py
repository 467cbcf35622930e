"""timing_stats.json."""

from __future__ import annotations

import pytest
import torch

from oelm.training.measure.timing import WARMUP_STEPS, Timer

CPU = torch.device("cpu")


def test_timing_counts_complete_steps_without_warm_up(tmp_path):
    timer = Timer(tmp_path / "steps.bin", CPU)
    for number in range(10):
        with timer.step(number) as facts:
            facts.update(tokens=100.0, flops=3e6, full_flops=4e6)
    with timer.validating():
        pass
    stats = timer.stats(10)
    assert stats.num_steps_measured == 10 - WARMUP_STEPS
    assert stats.warmup_steps == WARMUP_STEPS
    assert stats.num_validations == 1
    assert stats.predicted_saving == pytest.approx(0.25)
    assert stats.flops_per_step == 3e6
    assert stats.tokens_per_second == pytest.approx(100 / stats.mean_step_time)
    order = [getattr(stats, f"{name}_step_time") for name in ("min", "median", "p95", "p99", "max")]
    assert order == sorted(order)
    # A later attempt: its steps replace the repeated ones, and it has its own warm-up.
    later = Timer(tmp_path / "steps.bin", CPU)
    later.start(stats)
    for number in range(8, 14):
        with later.step(number) as facts:
            facts.update(tokens=100.0, flops=3e6, full_flops=4e6)
    after = later.stats(14)
    assert after.num_steps_measured + after.warmup_steps == 14
    assert after.warmup_steps == 2 * WARMUP_STEPS
    assert after.total_wall_time > stats.total_wall_time
    assert after.num_validations == 1


def test_timing_without_steps_is_empty(tmp_path):
    stats = Timer(tmp_path / "none.bin", CPU).stats(0)
    assert stats.num_steps_measured == 0
    assert stats.mean_step_time is None
