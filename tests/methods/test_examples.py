"""The scripts in examples/ run."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_fine_tune(capsys):
    assert example("fine_tune").main().ok
    assert "24,960" in capsys.readouterr().out


def test_own_loop(capsys):
    assert example("own_loop").main().ok
    assert "6,336 of 6,336" in capsys.readouterr().out


def test_own_model(capsys):
    example("own_model").main()
    assert "ok" in capsys.readouterr().out


def test_every_example_has_a_test():
    tested = {"fine_tune", "fsdp_bytes", "own_loop", "own_model"}  # tests/training/test_fsdp_bytes.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
