"""Formats of list options, and suggestions for unknown flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oelm.cli.main import main, make_app
from oelm.cli.suggest import suggest
from oelm.cli.values import integers
from oelm.errors import UsageError
from oelm.experiments.catalogue import select


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        ([], []),  # the seeds of a study file, otherwise 42
        (["--seeds", "0", "1", "2"], [0, 1, 2]),
        (["--seeds", "0,1,2"], [0, 1, 2]),
        (["--seeds", "0-3"], [0, 1, 2, 3]),
        (["--seeds", "0-1", "4,6-7", "9"], [0, 1, 4, 6, 7, 9]),
        (["--seeds", "1", "--seeds", "2"], [1, 2]),
    ],
)
def test_formats_of_seeds(words: list[str], seeds: list[int]) -> None:
    for command in ("run", "doctor"):
        given = make_app().parse_args([command, "GPT-01", *words])[1]
        given.apply_defaults()
        assert list(given.arguments["seeds"]) == seeds


@pytest.mark.parametrize("word", ["x", "1.5", "-1", "3-1", "0-999999", "1..3", "", "٣"])
def test_invalid_seeds(word: str) -> None:
    with pytest.raises(UsageError, match="--seeds"):
        integers([word], "--seeds")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0", "0", "1"], "--seeds: 0 is listed twice"),
        (["--seeds", "0-2,1"], "--seeds: 1 is listed twice"),
        (["--seeds", "4", "--seeds", "4"], "--seeds: 4 is listed twice"),
        (["--trial-seeds", "7", "7"], "--trial-seeds: 7 is listed twice"),
        (["--grid", "1e-3", "0.001"], "--grid: 0.001 is listed twice"),
    ],
)
def test_a_value_that_is_listed_twice_is_an_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "GPT-01", "--dry-run", "--scale", "smoke", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["1", "4"], ["XNLI-01", "GPT-CLS-08"]),
        (["1-4"], ["XNLI-01", "GPT-CLS-08"]),
        (["2,3"], ["GPT-01", "GPT-07"]),
        (["2", "--phase", "paper"], ["GPT-01", "MNLI-02"]),
        (["Paper"], ["SST-2-01", "MNLI-02"]),
    ],
)
def test_formats_of_phases(words: list[str], ids: list[str]) -> None:
    given = make_app().parse_args(["run", "--phase", *words])[1].arguments
    chosen = [e.id for e in select(phases=given["selection"].phase)]
    assert [chosen[0], chosen[-1]] == ids
    assert len(set(chosen)) == len(chosen)


def test_formats_of_a_grid() -> None:
    words = ["run", "X", "--grid", "1e-3,2e-3", "4e-3", "--trial-seeds", "0-1"]
    tuning = make_app().parse_args(words)[1].arguments["tuning"]
    assert (tuning.grid, tuning.trial_seeds) == ((1e-3, 2e-3, 4e-3), (0, 1))


RUN, TRAIN = ("--all", "--set", "--seeds", "--gpus", "--slots", "--runs"), ("--set", "--seed", "--device")


@pytest.mark.parametrize(
    ("word", "options", "meant"),
    [
        ("--lr", RUN, "--set optim.lr=1e-3"),
        ("--lr=2e-4", RUN, "--set optim.lr=2e-4"),
        ("--learning_rate", RUN, "--set optim.lr=1e-3"),
        ("--steps", TRAIN, "--set budget.steps=600"),
        ("--batch-size", TRAIN, "--set budget.batch_size=16"),
        ("--batchsize", TRAIN, "--set budget.batch_size=16"),
        ("--epochs", TRAIN, "--set budget.epochs=1"),
        ("--model", RUN, "--set model.name=mini"),
        ("--dataset", RUN, "--set data.dataset=wikitext2"),
        ("--device", ("--gpus", "--set"), "--gpus"),
        ("--seed", RUN, "--seeds"),
        ("--seeds", TRAIN, "--seed"),
        ("--gpu", TRAIN, "--device"),
        ("--out", RUN, "--runs"),
        ("--lr", ("--all", "--json"), ""),
        ("--zzz", RUN, ""),
    ],
)
def test_suggestion_for_an_unknown_flag(word: str, options: tuple[str, ...], meant: str) -> None:
    assert suggest(word, options) == (f"did you mean '{meant}'?" if meant else "")


def test_studies_are_arguments_of_analyze_and_report_only(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("analyze", "report", "generate", "train"):
        assert main([command, "--study", "gap"]) == 2
        hint = f"write the names of studies without an option, such as oelm {command} gap"
        assert (hint in capsys.readouterr().err) == (command in ("analyze", "report"))


def test_the_name_of_a_study_is_not_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", "longer", "--scale", "mini", "--dry-run"]) == 2
    assert "longer is a study, not an experiment; `--study longer`" in capsys.readouterr().err


def test_every_suggested_field_exists() -> None:
    from oelm.cli.suggest import _FIELDS
    from oelm.config.overrides import split_word

    for example in _FIELDS.values():
        name, _ = split_word(example)
        assert example.startswith(name)


def test_dry_run_shows_device_and_data_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stories = tmp_path / "data" / "tinystories"
    stories.mkdir(parents=True)
    (stories / "train.jsonl").write_text('{"text": "Once."}\n', encoding="utf-8")
    words = ["run", "GPT-01", "--scale", "mini", "smoke", "--runs", str(tmp_path / "runs"), "--gpus", "none"]
    assert main([*words, "--data-dir", str(tmp_path / "data"), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"] == "cpu"
    assert plan["data"] == {
        "tinystories": f"the folder {stories} and built-in text in place of 'tinystories'"
    }
    assert main([*words, "--dry-run"]) == 0
    assert "data: tinystories from built-in text in place of 'tinystories'" in capsys.readouterr().out
    assert main(["run", "GPT-04", *words[2:], "--data-dir", str(tmp_path / "data"), "--dry-run"]) == 2
    assert "it has tinystories" in capsys.readouterr().err
