"""The replay of `oelm decide` against a fixed number of seeds, on a study written for the test."""

from __future__ import annotations

from benchmarks.decide import replay

from run_factory import lm_config, write_run


def test_clear_differences_take_a_fraction_of_the_fixed_design(tmp_path):
    for seed, (base, far) in enumerate([(8.0, 9.6), (8.1, 9.7), (7.9, 9.6)]):
        write_run(tmp_path, lm_config(seed=seed), base)
        write_run(tmp_path, lm_config("FAR", "oelm-freeze", seed=seed), far)
    result = replay(tmp_path, ["target"], fixed=12, max_seeds=12, draws=3)
    assert (result["questions"], result["arms"]) == (1, 2)
    assert result["fixed_hours"] == 12 * 2 * 60 / 3600  # a written run takes a minute
    assert 0.2 < result["share"] < 0.7
    assert 3 <= result["seeds_per_verdict"] <= 12
    assert result["agreement"] == {"same verdict": 1.0}
