"""Commands that need a real run: one experiment is trained at smoke scale, and all tests use it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.experiments import doctor
from oelm.experiments.catalogue import experiment
from oelm.experiments.plan import Plan
from oelm.experiments.request import Request
from oelm.runs.folder import RunFolder
from run_factory import lm_config, write_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OELM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("OELM_DATA_DIR", raising=False)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    runs = tmp_path_factory.mktemp("study") / "runs"
    assert main(["train", "GPT-02", "--scale", "smoke", "--seed", "1", "--runs", str(runs)]) == 0
    return runs


@pytest.fixture
def folder(root: Path) -> RunFolder:
    return RunFolder(root / "paper" / "GPT-02" / "scale=smoke" / "seed=1")


def test_train_leaves_a_complete_run_folder(folder: RunFolder) -> None:
    results, manifest = folder.results(), folder.manifest()
    assert results is not None
    assert results.test.ppl > 1
    assert results.method == "oelm-freeze" or results.arm == "oelm-freeze"
    assert manifest is not None
    assert "standing in for tinystories" in manifest.data.origin
    status = folder.status()
    assert status is not None
    assert status.state == "finished"


def test_train_without_a_terminal_prints_plain_lines(
    tmp_path: Path, cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "GPT-02", "--scale", "smoke", "--runs", str(tmp_path / "plain")]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("GPT-02 smoke seed 42")
    assert any(re.search(r"\d\d:\d\d:\d\d attempt 1 on ", line) for line in lines)
    assert sum("  validation loss " in line for line in lines) == 2
    assert "\x1b" not in "".join(lines)
    assert [line for line in lines if line.endswith("finished")] == ["finished"]
    assert main([*words, "--seed", "7", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["state"] == "finished"
    assert printed.err.count("  validation loss ") == 2


def test_training_again_changes_nothing(
    root: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folder.results_file.read_bytes()
    words = ["train", "GPT-02", "--scale", "smoke", "--seed", "1", "--runs", str(root), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"
    assert folder.results_file.read_bytes() == before


def test_doctor_counts_the_disk_space_of_runs_that_have_not_finished(
    root: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "estimate", lambda config, root: estimated)
    estimated = Plan(folder.path, 1, 1, None, "", 5 * 2**30, 1.0, "", kept_bytes=3 * 2**30)
    untuned = Request([experiment("GPT-02")], ("smoke",), seeds=(1, 2, 3)).arms()
    # Seed 1 has finished. The two others keep 3 GiB each, and one of them needs 2 GiB more while it trains.
    assert doctor._disk(root, untuned).text.startswith("2 runs need at most 8.0 GiB; ")
    tuned = Request([experiment("TS-FREEZE-TUNED")], ("smoke",), seeds=(0, 1, 2)).arms()
    text = doctor._disk(root, tuned).text
    assert text.startswith("3 runs and 4 tuning trials need at most 11.0 GiB; ")


def test_another_config_in_the_same_folder_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "GPT-02", "--scale", "smoke", "--seed", "1", "--runs", str(root)]
    assert main([*words, "--set", "optim.lr=0.5"]) == 2
    assert "optim.lr" in capsys.readouterr().err


def test_train_before_the_tuning_trials_says_how_to_run_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "TS-FREEZE-TUNED", "--scale", "smoke", "--runs", str(tmp_path / "runs")]) == 1
    error = capsys.readouterr().err
    assert "oelm run TS-FREEZE-TUNED --scale smoke" in error


def test_status_as_table_and_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--runs", str(root)]) == 0
    assert "1 run: 1 finished" in capsys.readouterr().out
    assert main(["status", "--runs", str(root), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["id"], row["state"], row["step"], row["total_steps"]) == ("GPT-02", "finished", 8, 8)
    assert row["metric"]["name"] == "ppl"
    assert main(["status", "--runs", str(root), "--state", "running", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_monitor_once_shows_runs_and_the_log(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--runs", str(root), "--once"]) == 0
    text = capsys.readouterr().out
    assert "GPT-02" in text
    assert "finished" in text


def test_a_prompt_that_is_not_utf8_is_a_usage_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "GPT-02", "--runs", str(root), "--prompt", "a\udcff"]) == 2
    assert "not valid UTF-8" in capsys.readouterr().err


def test_generate_is_the_same_for_the_same_seed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "gpt-02", "--runs", str(root), "--prompt", "Once", "--tokens", "8", "--json"]
    texts = []
    for seed in ("3", "3", "4"):
        assert main([*words, "--sample-seed", seed]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1] != texts[2]
    assert main([*words[:-1], "--top-p", "0"]) == 2
    assert main(["generate", "gpt-02", "--runs", str(root), "--prompt", ""]) == 2


def test_probe_of_frozen_and_of_trained_projections(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "GPT-02", "--runs", str(root)]) == 0
    text = capsys.readouterr().out
    assert "Share of the constant part" in text
    assert "cut to a rank" not in text  # frozen matrices have learned nothing
    runs = ["--scale", "smoke", "--seed", "0", "--runs", str(tmp_path / "runs")]
    assert main(["train", "DEMO-LM-baseline", *runs]) == 0
    capsys.readouterr()
    assert main(["probe", "DEMO-LM-baseline", "--rows", "8", *runs, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    layers = len(facts["constant"])
    assert layers == len(facts["by_distance"]) == len(facts["undone"]) == 2
    assert facts["truncation"]["0"] != 0
    assert facts["truncation"]["32"] == pytest.approx(0, abs=1e-4)  # the full rank of width 32


def test_probe_refuses_data_that_changed_since_the_run(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "runs"))
    (file,) = copy.rglob("manifest.json")
    manifest = json.loads(file.read_text())
    manifest["data"]["fingerprints"]["validation"] = "0" * 64
    file.write_text(json.dumps(manifest))
    assert main(["probe", "GPT-02", "--runs", str(copy)]) == 1
    assert "has changed since the run" in " ".join(capsys.readouterr().err.split())


def test_probe_draws_several_runs_in_one_figure(
    root: Path, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "why.svg"
    words = ["GPT-02", str(folder.path), "--rows", "8", "--runs", str(root)]
    assert main(["probe", *words, "--figure", str(figure), "--json"]) == 0
    assert [facts["method"] for facts in json.loads(capsys.readouterr().out)] == ["oelm-freeze"] * 2
    assert "constant part, %" in figure.read_text(encoding="utf-8")
    assert main(["probe", "--runs", str(root)]) == 2
    assert "no run given" in capsys.readouterr().err


def test_a_run_with_damaged_results_is_not_exported_and_named_when_it_is_packed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "runs"))
    (file,) = copy.rglob("results.json")
    file.write_bytes(file.read_bytes()[:-20])
    target = tmp_path / "exported"
    assert main(["export", "GPT-02", "--runs", str(copy), "-o", str(target)]) == 1
    assert "results.json" in capsys.readouterr().err
    assert not target.exists()
    assert main(["archive", "pack", str(tmp_path / "x.tar.gz"), "--runs", str(copy)]) == 0
    assert "is damaged: results.json has changed since it was written" in capsys.readouterr().err


@pytest.mark.slow
def test_export_loads_in_transformers_with_the_same_logits(
    root: Path, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "exported"
    words = ["export", "GPT-02", "--runs", str(root), "-o", str(target)]
    assert main(words) == 0
    import torch
    from transformers import AutoTokenizer, GPT2LMHeadModel

    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.methods.saving.load import load

    ours, theirs = load(folder.best).eval(), GPT2LMHeadModel.from_pretrained(target).eval()
    text = "Mira went to the harbour."
    ids = torch.tensor([Tokenizer.load(folder.best).encode(text)])
    assert AutoTokenizer.from_pretrained(target)(text).input_ids == ids[0].tolist()
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    card = (target / "README.md").read_text(encoding="utf-8")
    assert "| method | `oelm-freeze`: " in card
    assert "| test perplexity | " in card
    assert main(words) == 2  # a folder that is not empty is never overwritten
    assert "already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_export_of_a_transformers_model_includes_the_extras(tmp_path: Path) -> None:
    """transformers would drop the trainable extras silently, so the export folds them into the weights."""
    runs, target = str(tmp_path / "runs"), tmp_path / "exported"
    words = ["--scale", "smoke", "--runs", runs, "--set", "method=oelm-core", "--set", "optim.lr=0.05"]
    assert main(["train", "SST-2-02", *words]) == 0
    (best,) = Path(runs).rglob("best")
    assert main(["export", str(best.parent), "-o", str(target)]) == 0
    import torch
    from transformers import AutoModelForSequenceClassification

    from oelm.methods.saving.load import load

    ours, theirs = load(best).eval(), AutoModelForSequenceClassification.from_pretrained(target).eval()
    ids = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-4)
    for layer, frozen in zip(theirs.bert.encoder.layer, ours.bert.encoder.layer, strict=True):
        plain, extended = layer.attention.self.query.weight, frozen.attention.self.query.weight
        assert (plain - extended).abs().max() > 1e-3  # the core was trained, and the export includes it


def test_clean_deletes_only_after_confirmation(
    root: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "--runs", str(root)]) == 0
    assert "nothing to delete" in capsys.readouterr().out  # a finished run deletes its checkpoints itself
    folder.latest.write_bytes(b"left by a process that was killed")
    assert main(["clean", "--runs", str(root)]) == 2  # without a terminal nothing is deleted
    said = capsys.readouterr().err
    assert "add --yes to delete the checkpoints" in said
    assert "nothing was deleted" in said
    assert folder.latest.exists()
    assert main(["clean", "--runs", str(root), "--yes", "--json"]) == 0
    freed = json.loads(capsys.readouterr().out)
    assert freed["freed_bytes"] == freed["freeable_bytes"] > 0
    assert not folder.latest.exists()
    assert folder.best.is_dir()
    assert folder.results() is not None


def test_clean_accepts_a_study_of_ones_own_that_has_nothing_to_delete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, lm_config(study="own"))
    assert main(["clean", "--runs", str(tmp_path), "--study", "own"]) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_an_archive_can_be_packed_verified_and_merged(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = str(tmp_path / "paper.tar.gz")
    assert main(["archive", "pack", packed, "--runs", str(root), "--study", "paper"]) == 0
    assert main(["archive", "verify", packed]) == 0
    assert main(["archive", "merge", packed, "--runs", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert main(["status", "--runs", str(tmp_path / "other"), "--json"]) == 0
    assert [r["state"] for r in json.loads(capsys.readouterr().out)] == ["finished"]


def test_doctor_takes_a_real_step_and_reports_problems(
    tmp_path: Path, cache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = str(tmp_path / "runs")
    assert main(["doctor", "GPT-02", "GPT-CLS-01", "--scale", "smoke", "--runs", runs, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    subjects = [f["subject"] for f in report["findings"]]
    expected = ["software", "machine", "attention", "products", "precision", "runs folder", "disk"]
    assert subjects[:7] == expected
    assert {"data tinystories", "GPT-02", "data imdb", "GPT-CLS-01"} <= set(subjects)
    assert not Path(runs).exists()

    tuned = ["doctor", "TS-FREEZE-TUNED", "--scale", "smoke", "--seeds", "0", "1", "2", "--runs", runs]
    assert main(tuned) == 0
    assert "3 runs and 4 tuning trials need at most" in capsys.readouterr().out

    data = tmp_path / "data" / "imdb"
    data.mkdir(parents=True)
    rows = [{"text": f"a film {i}", "label": i % 2} for i in range(40)]
    for split in ("train", "validation", "test"):
        bad = [*rows, {"text": "the classic", "label": -1}] if split == "train" else rows
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad), encoding="utf-8")
    words = ["doctor", "GPT-CLS-01", "--scale", "mini", "--runs", runs, "--data-dir", str(tmp_path / "data")]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "-1" in text
    assert "train.jsonl" in text
    assert "what to do" in text

    assert main(["doctor", "GPT-02", "--scale", "smoke", "--runs", runs, "--set", "data.source=local"]) == 2
    assert "set --data-dir or OELM_DATA_DIR" in capsys.readouterr().err


def test_an_error_of_the_hub_is_printed_without_escaped_line_breaks(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oelm.data.sources.hub.offline", lambda: False)
    monkeypatch.setattr("oelm.data.sources.hub.reachable", lambda: False)
    words = ["GPT-02", "--scale", "mini", "--set", "data.source=hub", "--runs", str(tmp_path)]
    for command, code in ((["run", *words], 1), (["status", "--runs", str(tmp_path)], 0)):
        assert main(command) == code
        said = capsys.readouterr().out
        assert "the hub cannot be reached. What to do: copy the dataset to DIR/tinystories/" in said
        assert "\\n" not in said


def test_shard_needs_several_gpus_per_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "GPT-02", "--scale", "smoke", "--runs", str(tmp_path), "--shard"]) == 2
    assert "--gpus-per-run" in capsys.readouterr().err


@pytest.mark.slow
def test_train_under_torchrun_shards_the_model(tmp_path: Path, cache: None) -> None:
    """Two processes train a run; a second call in the same processes finds it finished."""
    words = ["train", "GPT-02", "--scale", "smoke", "--runs", str(tmp_path), "--shard", "--device", "cpu"]
    words += ["--set", "budget.steps=4"]
    program = tmp_path / "twice.py"
    program.write_text(
        "from oelm.cli.main import main\nfrom oelm.experiments.launch.ranks import exit_rank\n"
        f"exit_rank(lambda: main({words!r}) or main({words!r}))\n",
        encoding="utf-8",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2  # rank 0 prints, once per call
    (folder,) = (RunFolder(path.parent) for path in tmp_path.rglob("results.json"))
    assert "2 processes, model sharded" in folder.log_file.read_text(encoding="utf-8")
