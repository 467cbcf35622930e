"""Loading of valid and broken run folders: a broken one gives a warning, never an error."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oelm.analysis.load import load_runs
from oelm.errors import OelmError
from oelm.runs.archives.keep import keep
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Manifest, TimingStats
from run_factory import analyze, cls_config, dump, lm_config, write_run, write_study, write_trials


def warnings_of(loaded) -> list[str]:
    return [str(w) for w in loaded.warnings]


def test_a_valid_folder_loads_without_warnings(tmp_path):
    write_run(tmp_path, lm_config(seed=3), 7.5)
    write_trials(tmp_path, lm_config(seed=0))
    loaded = load_runs(tmp_path)
    (run,) = loaded.runs
    assert (run.id, run.seed, run.state, run.arm) == ("GPT-01", 3, "finished", "baseline")
    assert run.result.test == 7.5
    assert len(loaded.trials) == 3
    assert loaded.warnings == []


def edit_results(folder: Path, **changes) -> None:
    path = folder / "results.json"
    dump(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


BREAKAGES = {
    "config is not YAML": lambda f: (f / "config.yaml").write_text("{ no: yaml: at all"),
    "config is binary": lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe\x00"),
    "config has an unknown field": lambda f: (f / "config.yaml").write_text("id: x\nstuddy: y\n"),
    "config is missing": lambda f: (f / "config.yaml").unlink(),
    "results are cut off": lambda f: (f / "results.json").write_text('{"id": "GPT-01", "te'),
    "results are a list": lambda f: (f / "results.json").write_text("[]"),
    "results are empty": lambda f: (f / "results.json").write_text(""),
    "results are missing": lambda f: (f / "results.json").unlink(),
    "perplexity is NaN": lambda f: edit_results(f, test={"ppl": float("nan"), "n": 5}),
    "perplexity is below one": lambda f: edit_results(f, test={"ppl": 0.3, "loss": -1.2, "n": 5}),
    "perplexity is text": lambda f: edit_results(f, test={"ppl": "8", "loss": 2, "n": 5}),
    "metric is unknown": lambda f: edit_results(f, metric="bleu"),
    "results of another seed": lambda f: edit_results(f, seed=99),
    "parameters are missing": lambda f: edit_results(f, parameters=None),
    "fairness is missing": lambda f: edit_results(f, fairness=None),
    "status is cut off": lambda f: (f / "status.json").write_text('{"state": "fini'),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_folder_gives_a_warning_and_the_others_are_compared(tmp_path, name):
    for seed in range(3):
        write_run(tmp_path, lm_config(seed=seed), 8.0 + seed / 10)
        broken = write_run(tmp_path, lm_config("GPT-02", "oelm-freeze", seed=seed), 8.5 + seed / 10)
    BREAKAGES[name](broken)
    analysis = analyze(tmp_path)
    assert any(str(broken) in text for text in map(str, analysis.warnings)), "the folder must be named"
    (comparison,) = analysis.comparisons.of("baseline")
    assert comparison.effect is not None
    assert comparison.effect.n >= 2  # the valid seeds are still compared
    analysis.to_dict()


def test_metrics_that_cannot_be_read_do_not_end_the_analysis(tmp_path):
    folder = write_run(tmp_path, lm_config(), state="running")
    (folder / "status.json").unlink()
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    (folder / "metrics.jsonl").mkdir()
    (run,) = load_runs(tmp_path).runs
    assert run.state == "pending"


def test_files_that_are_read_later_give_warnings_too(tmp_path):
    folder = write_run(tmp_path, cls_config(), hits=np.ones(10, dtype=int))
    for name in ("manifest.json", "timing_stats.json", "predictions.json", "freeze_audit.json"):
        (folder / name).write_text("{broken")
    RunFolder(folder).write_checksums()
    loaded = load_runs(tmp_path)
    (run,) = loaded.runs
    assert loaded.warnings == []  # nothing read yet
    assert (run.manifest, run.timing, run.hits) == (Manifest(), TimingStats(), None)
    assert run.audited  # an unreadable audit is a warning, not a failed audit
    assert len(loaded.warnings) == 4


@pytest.mark.parametrize(
    "data", ["text", {"rows": "many"}, {"rows": {"train": "many"}}, {"fingerprints": [1]}]
)
def test_an_invalid_manifest_gives_a_warning_and_is_not_used(tmp_path, data):
    folder = write_run(tmp_path, cls_config(), hits=np.ones(10, dtype=int))
    dump(folder / "manifest.json", {"data": data})
    loaded = load_runs(tmp_path)
    assert loaded.runs[0].manifest == Manifest()
    assert "manifest.json" in warnings_of(loaded)[0]


def test_predictions_that_contradict_the_results_are_not_used(tmp_path):
    folder = write_run(tmp_path, cls_config(), hits=np.array([1, 1, 0, 1]))
    dump(folder / "predictions.json", {"labels": [0, 1, 0, 1], "predicted": [1, 0, 1, 0]})
    loaded = load_runs(tmp_path)
    assert loaded.runs[0].hits is None
    assert "0.750000" in warnings_of(loaded)[0]


def test_a_copied_folder_counts_once(tmp_path):
    folder = write_run(tmp_path, lm_config(seed=0), 8.0)
    shutil.copytree(folder, folder.with_name("seed=1"))
    loaded = load_runs(tmp_path)
    assert len(loaded.runs) == 1
    texts = " ".join(warnings_of(loaded))
    assert "seed=0" in texts
    assert "is also in" in texts


def test_of_two_copies_the_one_at_its_path_counts_even_if_its_name_sorts_later(tmp_path):
    folder = write_run(tmp_path, lm_config(seed=0), 8.0)
    experiment = folder.parents[1]
    backup = shutil.copytree(experiment, experiment.with_name("Copy of it"))
    (backup / folder.relative_to(experiment) / "results.json").unlink()
    (run,) = load_runs(tmp_path).runs
    assert (run.path, run.state) == (folder, "finished")


def test_a_renamed_study_folder_gives_a_warning(tmp_path):
    write_run(tmp_path, lm_config())
    (tmp_path / "paper").rename(tmp_path / "renamed")
    (warning,) = analyze(tmp_path).warnings
    assert "the folder's path does not contain 'paper'" in str(warning)


def test_a_folder_without_a_run_gives_a_warning(tmp_path):
    (tmp_path / "paper" / "GPT-01" / "scale=mini" / "seed=banana").mkdir(parents=True)
    loaded = load_runs(tmp_path)
    assert loaded.runs == ()
    assert "seed=banana" in warnings_of(loaded)[0]


def test_an_unfinished_run_has_no_result_even_with_a_results_file(tmp_path):
    folder = write_run(tmp_path, lm_config(), 8.0)
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    dump(folder / "status.json", {**status, "state": "interrupted"})
    (run,) = load_runs(tmp_path).runs
    assert (run.state, run.result) == ("interrupted", None)


def test_a_missing_runs_folder_or_study_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(OelmError, match="oelm demo"):
        load_runs(tmp_path / "nothing")
    write_run(tmp_path, lm_config())
    with pytest.raises(OelmError, match="a study that has runs there: paper"):
        load_runs(tmp_path, ["papers"])


def test_studies_are_selected_by_name(tmp_path):
    write_run(tmp_path, lm_config())
    write_run(tmp_path, replace(lm_config(), study="gap"))
    assert {r.config.study for r in load_runs(tmp_path, ["gap"]).runs} == {"gap"}


def test_an_empty_runs_folder_gives_an_empty_analysis(tmp_path):
    analysis = analyze(tmp_path)
    assert analysis.to_dict()["comparisons"] == []


def test_totals_count_runs_trials_time_and_disk(tmp_path):
    analysis = analyze(write_study(tmp_path))
    assert dict(analysis.states) == {"finished": 24}
    assert len(analysis.loaded.trials) == 24
    assert analysis.compute_seconds == 48 * 60.0
    assert analysis.disk_bytes == sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())


def test_kept_results_give_the_same_analysis_as_the_runs(tmp_path):
    """An analysis does not need the weights, logs and checkpoints that are not kept."""
    runs = write_study(tmp_path / "runs")
    for folder in {path.parent for path in runs.rglob("status.json")}:
        (folder / "latest.pt").write_bytes(b"x" * 1000)
    keep(runs, tmp_path / "kept")
    places = ("runs_folder", "disk_bytes", "runs", "warnings")

    def analysis_of(root: Path) -> dict:
        found = analyze(root).to_dict()
        comparisons = [{k: v for k, v in c.items() if k not in places} for c in found["comparisons"]]
        return {k: v for k, v in found.items() if k not in places} | {"comparisons": comparisons}

    assert analysis_of(tmp_path / "kept") == analysis_of(runs)
    assert analysis_of(runs)["comparisons"]
