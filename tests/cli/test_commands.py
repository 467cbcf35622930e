"""Help, hints for wrong command lines, JSON output and exit codes of all commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.cli.main import COMMANDS, main, make_app
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Status


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main([]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"oelm {command}" in text
    assert "Example:" in text


def test_help_texts_wrap_at_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no text is that long, so each option has exactly one line
    for name, command in COMMANDS.items():
        for words in [[name, action.name] for action in command.actions] or [[name]]:
            assert main([*words, "--help"]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert not [line for line in lines if line.startswith("│" + 5 * " ")], words
            assert not [line for line in lines if "(default" in line and "[default" in line], words


def test_every_option_has_help() -> None:
    app = make_app()
    for name, command in COMMANDS.items():
        for part in [app[name][action.name] for action in command.actions] or [app[name]]:
            found = part.assemble_argument_collection(parse_docstring=True)
            options = [argument for argument in found if argument.name != "*"]
            missing = [argument.name for argument in options if not argument.parameter.help]
            assert not missing, (name, missing)


def test_the_completion_script_knows_commands_options_and_choices() -> None:
    script = make_app().generate_completion(shell="bash")
    assert all(word in script for word in ("monitor", "--seeds", "smoke"))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["lst"], "did you mean 'list'"),
        (["list", "--stduy", "gap"], "did you mean '--study'"),
        (["list", "--study", "gup"], "did you mean 'gap'"),
        (["show", "GPT-O2"], "did you mean 'GPT-02'"),
        (["show", "GPT-02", "--scale", "minni"], "did you mean 'mini'"),
        (["show", "GPT-02", "--set", "optim.lrr=1"], "optim.lr"),
        (["diff", "GPT-01", "GPT-2"], "did you mean 'GPT-0"),
        (["train", "GPT-02", "--seed", "x"], "--seed takes an integer, not 'x'"),
        (["train", "GPT-02", "--time-limit", "soon"], "not a duration"),
        (["train", "GPT-02", "--time-limit=-5m"], "not a duration"),
        (["run"], "no experiments selected"),
        (["run", "--phase", "7"], "there is no phase 7"),
        (["run", "GPT-01", "--on", "slrum"], "did you mean 'slurm'"),
        (["run", "GPT-01", "--gpus", "0,0"], "--gpus"),
        (["run", "GPT-01", "--scal", "smoke"], "did you mean '--scale'"),
        (["status", "--state", "runing"], "did you mean 'running'"),
        (["status", "--runs", "runz"], "the runs folder runz does not exist"),
        (["status", "--runs", "runz", "--json"], "the runs folder runz does not exist"),
        (["monitor", "--runs", "runz", "--once"], "the runs folder runz does not exist"),
        (["clean", "--runs", "runz", "--yes"], "the runs folder runz does not exist"),
        (["data", "prepar", "stories"], "did you mean 'prepare'"),
        (["data", "check", "stories", "--source", "buitlin"], "did you mean 'builtin'"),
        (["run", "GPT-01", "--gpus", "x,y"], "--gpus"),
        (["run", "GPT-01", "--as", "../elsewhere", "--dry-run"], "cannot be a study's name"),
        (["train", "GPT-01", "--scale", "smoke", "--as", "a/b"], "cannot be a study's name"),
        (["generate", "NOPE", "--prompt", "x", "--runs", "nowhere"], "nowhere has no runs"),
        (
            ["run", "GPT-02", "--scale", "smoke", "--set", "budget.steps=-4"],
            "budget.steps must be at least 0",
        ),
        (["run", "GPT-02", "--scale", "smoke", "--set", "optim.lr=nan"], "optim.lr must be positive"),
        (["run", "GPT-02", "--set", "data.dataset=tinystoris"], "did you mean 'tinystories'"),
        (["train", "GPT-02", "--scale", "smoke", "--set", "budget.batch_size=0"], "batch_size must be"),
        (
            ["run", "GPT-01", "GPT-02", "--set", "model.name=smok"],
            "GPT-01: unknown GPT size 'smok'; did you mean 'smoke'?",
        ),
        (["run", "GPT-02", "--scale", "smoke", "--set", "model.name=smok"], "did you mean 'smoke'"),
        (["run", "GPT-02", "--set", "model.family=hf"], "task lm cannot train a transformers model"),
        (["run", "XNLI-02", "--set", "model.name=./models/nowhere"], "does not exist"),
        (["train", "XNLI-02", "--scale", "smoke", "--set", "model.name=mini-lm"], "did you mean 'minilm'"),
        (["run", "GPT-02", "--set", "data.tokenizer=gtp2"], "did you mean 'gpt2'"),
        (["run", "GPT-02", "--set", "data.tokenizer=bpe1024"], "did you mean 'bpe-1024'"),
        (["run", "GPT-02", "--set", "data.tokenizer=bpe-12"], "needs at least 257 tokens"),
        (["run", "GPT-02", "--set", "data.tokenizer=model"], "'medium-512' has no tokenizer"),
        (["run", "GPT-02", "--set", "data.dataset=sst2"], "is for classification"),
        (["run", "GPT-02", "--scale", "mini", "--data-dir", "nowhere"], "the data folder nowhere does not"),
        (
            ["run", "GPT-02", "--scale", "smoke", "--data-dir", "."],
            "--data-dir has no effect at smoke scale",
        ),
        (["run", "GPT-01", "--phase", "2"], "cannot be combined with --phase"),
        (["run", "--study", "gap", "--phase", "2"], "the study gap has no phase 2"),
        (
            ["run", "GPT-01", "--partition", "gpu", "--time", "8h"],
            "allowed only with --on slurm: --partition, --time; add",
        ),
        (["run", "GPT-01", "--on", "slurm", "--slots", "2"], "use --parallel"),
        (["run", "GPT-01", "--on", "slurm", "--pilot", "--no-wait"], "--no-wait cannot be combined"),
        (["run", "GPT-01", "--on", "slurm", "--time", "5s"], "at least one minute"),
        (["run", "GPT-01", "--on", "slurm", "--time", "366d"], "--time must be at most 365 days"),
        (["run", "GPT-01", "--retries", "-1"], "--retries must be >= 0, not -1"),
        (["run", "GPT-01", "--pilot-factor", "2"], "add --pilot"),
        (["run", "GPT-01", "--grid", "0.1"], "add --tune"),
        (["run", "TS-FREEZE-TUNED", "--set", "optim.lr=1e-3"], "use --no-tune"),
        (["status", "--study", "papr"], "did you mean 'paper'"),
        (["status", "--scale", "smok"], "did you mean 'smoke'"),
        (["export", "GPT-01", "--public"], "--public has no effect without --push-to-hub"),
        (["clean", "--study", "papr"], "did you mean 'paper'"),
        (["monitor", "--every", "0"], "--every must be > 0, not 0"),
        (["archive", "merge", "nowhere.tar.gz"], "there is no archive nowhere.tar.gz"),
        (["archive"], "required"),
        (["--verion"], "did you mean '--version'"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_a_hint_and_exit_code_2(
    words: list[str],
    hint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(words)
    error = capsys.readouterr().err
    assert code == 2, error
    assert hint in error
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []  # a wrong command line creates no files


def test_show_names_the_folder_in_which_train_stores_a_learning_rate_of_ones_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", "GAP-TS-oelm-plus-rope", "--scale", "mini", "--set", "optim.lr=0.01"]) == 0
    shown = capsys.readouterr().out
    assert "gap-untuned/GAP-TS-oelm-plus-rope" in shown
    assert "the learning rate is chosen" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "--runs", "runs", "-o", "."], "directory"),
        (["report", "--runs", "runs", "-o", "file/report.html"], "file"),
        (["archive", "pack", "file/results.tar.gz", "--runs", "runs"], "file is a file; name another folder"),
        (["export", "GPT-01", "--runs", "runs", "-o", "file"], "file already exists"),
        (["analyze", "--runs", "file"], "--runs: file is not a folder"),
        (["export", "GPT-01", "--runs", "file"], "--runs: file is not a folder"),
        (["archive", "keep", "file", "--runs", "runs"], "FOLDER: file cannot be used: file is not a folder"),
        (["archive", "merge", "x.tar.gz", "--runs", "file"], "file cannot be used: file is not a folder"),
        (["analyze", "--runs", "empty"], "no runs in empty yet"),
        (["report", "--runs", "empty"], "no runs in empty yet"),
    ],
)
def test_an_unusable_path_is_an_error_without_a_traceback(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (job,) = make_jobs([experiment("GPT-01").at("smoke", 0)], "runs")
    (job.folder / "best").mkdir()
    assert main(words) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("oelm: ")
    assert said in error
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_user_error_in_a_real_process_shows_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oelm.cli.main", "show", "GPT-99"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("oelm: unknown experiment 'GPT-99'")
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("oelm.cli.catalogue.list_methods", interrupted)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "oelm: interrupted\n"


@pytest.mark.parametrize("words", ["list", "--help"])
def test_a_closed_pipe_is_not_an_error(words: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m oelm {words} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_output_that_cannot_be_written_or_shown_is_no_traceback() -> None:
    command = [sys.executable, "-m", "oelm", "methods"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=ascii_only, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if not Path("/dev/full").exists():
        return
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    assert (done.returncode, done.stderr) == (1, "oelm: cannot write the output: No space left on device\n")


def test_list_groups_by_phase_and_shows_reported_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    assert text.index("phase 1") < text.index("XNLI-01") < text.index("phase 2") < text.index("GPT-01")
    assert "PPL 4.69" in text
    assert "accuracy 77.79 %" in text
    listed = facts(capsys, "list", "--phase", "3")
    assert isinstance(listed, list)
    assert [e["reported"]["value"] for e in listed] == [4.97, 47.24, 54.29, 25.13, 29.03]


def test_diff_shows_learning_rate_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "diff", "GPT-01", "GPT-02")
    assert isinstance(found, dict)
    assert found["optim.lr"] == [3e-4, 1e-3]
    assert found["method.freeze"] == ["none", "all"]
    assert "budget.steps" not in found


def test_show_prints_parameter_counts_disk_and_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("GPT-02", "--runs", str(tmp_path / "runs"))
    shown = facts(capsys, "show", *words)
    assert isinstance(shown, dict)
    plan = shown["plan"]
    assert plan["parameters"]["total"] == 44_896_768
    assert plan["parameters"]["frozen"] == plan["parameters"]["qk_total"] == 3_145_728
    assert (plan["steps"], plan["tokens"]) == (100_000, 100_000 * 8 * 512)
    # Two checkpoints and a third while it is written, each with 12 bytes per trainable and 4 bytes per frozen
    # parameter; and the best model twice, because the new one is written before the old one is deleted.
    assert plan["disk_bytes"] == 3 * (4 * 44_896_768 + 8 * 41_751_040) + 2 * 4 * 44_896_768
    assert plan["seconds"] > 0
    (unequal,) = shown["unequal"]
    assert (unequal["arm"], unequal["field"], unequal["values"]) == ("GPT-02", "optim.lr", [1e-3, 3e-4])
    assert unequal["why"] == "as the original study published it"
    assert main(["show", *words, "--scale", "smoke", "--set", "method=oelm-plus"]) == 0
    text = capsys.readouterr().out
    assert "built-in text replaces 'tinystories'" in text
    assert "name: oelm-plus" in text
    # The baseline has no biases, so the change would be an error there.
    words = ("GAP-TS-oelm-plus-rope", "--runs", str(tmp_path / "runs"))
    assert main(["show", *words, "--scale", "smoke", "--set", "method.bias_scale=8"]) == 0
    assert "bias_scale: 8.0" in capsys.readouterr().out


@pytest.mark.slow
def test_show_counts_bert_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    shown = facts(capsys, "show", "MNLI-02")
    assert isinstance(shown, dict)
    counts = shown["plan"]["parameters"]
    assert (counts["total"], counts["frozen"], counts["trainable"]) == (109_484_547, 14_174_208, 95_310_339)


def test_methods_lists_purpose_and_control_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    named = facts(capsys, "methods")
    assert isinstance(named, dict)
    assert "oelm_v2" in named["oelm-freeze"]["aliases"]
    assert all(m["purpose"] and m["controls"] for m in named.values())


def test_dry_run_of_everything_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    words = ["run", "--all", "--scale", "smoke", "--seeds", "0", "1", "--runs", str(runs), "--dry-run"]
    plan = facts(capsys, *words)
    assert isinstance(plan, dict)
    listed = [row["folder"] for row in plan["runs"]]
    assert len(set(listed)) == len(listed)
    assert str(runs / "paper" / "GPT-CLS-08" / "scale=smoke" / "seed=1") in listed
    assert {row["state"] for row in plan["runs"]} == {""}
    assert not runs.exists()
    assert main(words) == 0
    assert "unequal: GPT-02" in capsys.readouterr().out


def test_dry_run_shows_which_runs_are_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = make_jobs([experiment("GPT-01").at("smoke", 0)], tmp_path)
    RunFolder(job.folder).write_status(Status(state="finished"))
    RunFolder(job.folder).results_file.write_text("{}", encoding="utf-8")
    words = ["run", "GPT-01", "--scale", "smoke", "--seeds", "0", "1", "--runs", str(tmp_path), "--dry-run"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "seed=0 (finished)" in text
    assert "2 runs (1 finished) in" in text


def test_dry_run_refuses_what_the_run_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_jobs([experiment("GPT-01").at("smoke", 1)], tmp_path)
    words = ["run", "GPT-01", "--scale", "smoke", "--seeds", "0", "1", "--runs", str(tmp_path)]
    changed = [*words, "--set", "budget.steps=3"]
    said = []
    for command in ([*changed, "--dry-run"], [*changed, "--dry-run", "--json"], changed):
        assert main(command) == 2
        printed = capsys.readouterr()
        said.append(printed.err)
        assert "lr" not in printed.out  # no run is promised
    assert "seed=1 contains a run with a different config" in said[0]
    assert len(set(said)) == 1
    assert not (tmp_path / "paper" / "GPT-01" / "scale=smoke" / "seed=0").exists()
    assert main([*words, "--dry-run"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        "GPT-02 --set optim.lr=0.5 budget.steps=7 compile=true",
        "GPT-02 --set optim.lr=0.5 --set budget.steps=7 --set compile=true",
        "--set=optim.lr=0.5 budget.steps=7 compile=true GPT-02",
        "--set optim.lr=0.5 budget.steps=7 GPT-02 --set compile=true",
    ],
)
def test_set_takes_several_fields(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = facts(capsys, "show", *words.split())
    assert isinstance(shown, dict)
    config = shown["config"]
    assert (config["optim"]["lr"], config["budget"]["steps"], config["compile"]) == (0.5, 7, True)


def test_show_applies_changes_to_the_baseline_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("show", "GPT-02", "--scale", "smoke", "--as", "mine", "--runs", str(tmp_path))
    shown = facts(capsys, *words)
    assert isinstance(shown, dict)
    assert len(shown["unequal"]) == 1
    assert shown["plan"]["folder"] == str(tmp_path / "mine" / "GPT-02" / "scale=smoke" / "seed=42")
    changed = facts(capsys, *words, "--set", "optim.lr=1e-3")
    assert isinstance(changed, dict)
    assert changed["unequal"] == []


def test_a_catalogue_file_registers_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from oelm.experiments.catalogue import register_experiment\n"
        "from oelm.experiments.experiment import Experiment\n"
        "from oelm.config.run_config import DataConfig\n"
        "register_experiment(Experiment(id='OWN-1', study='own', task='lm', data=DataConfig('stories'),"
        " method='oelm-plus'))\n"
    )
    command = [sys.executable, "-m", "oelm.cli.main", "list", "--study", "own"]
    environment = {**os.environ, "OELM_CATALOGUE": str(own)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "OWN-1" in done.stdout
    broken = tmp_path / "broken.py"
    broken.write_text("\nimport oelm.nothing\n", encoding="utf-8")
    assert main(["list", "--catalogue", str(broken)]) == 2
    assert "broken.py, line 2: ModuleNotFoundError" in capsys.readouterr().err
    ends = tmp_path / "ends.py"
    ends.write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    assert main(["list", "--catalogue", str(ends)]) == 2
    assert "ends.py, line 2: it ends the program with sys.exit()" in capsys.readouterr().err
    assert main(["list", "--catalogue", str(tmp_path / "none.py")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_output_files_of_a_report_must_differ_and_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["report", "-o", "r.html", "--markdown", "./r.html"]) == 2
    assert "-o and --markdown name the same file" in capsys.readouterr().err
    assert main(["report", "--csv", "file/table.csv"]) == 2
    assert "cannot write to file/table.csv, because file is a file" in capsys.readouterr().err
