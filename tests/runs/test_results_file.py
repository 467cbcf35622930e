"""`oelm archive keep`: one small results file per study that reads like the run folders."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fake_run import write_finished_run
from oelm.analysis.load import load_runs
from oelm.cli.main import main
from oelm.config.run_config import TuneConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.files.atomic import write_json
from oelm.runs.archives import results_file
from oelm.runs.archives.keep import KEPT_FILES, keep
from oelm.runs.archives.merge import merge
from oelm.runs.archives.results_file import read_results_file, write_results_file
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.scan import find_run, scan
from oelm.runs.schema import Status


def make_runs(root: Path, id: str = "GPT-01") -> list[RunFolder]:
    """A finished run and a finished tuning trial, with logs and a checkpoint."""
    config = experiment(id).at("smoke", 1)
    folders = []
    for each in (config, replace(config, tune=TuneConfig(trial=True))):
        folder = write_finished_run(run_path(root, each), each)
        for name in (*KEPT_FILES, "training.log", "latest.pt"):
            if not (folder.path / name).exists():
                (folder.path / name).write_text("{}\n")
        folder.write_checksums()
        folders.append(folder)
    return folders


def test_kept_results_read_like_the_runs_and_have_no_weights(tmp_path: Path) -> None:
    run, trial = make_runs(tmp_path / "runs")
    kept = keep(tmp_path / "runs", tmp_path / "results")
    file = tmp_path / "results" / "paper.jsonl.xz"
    assert (kept.runs, kept.files, kept.bytes) == (2, 1, file.stat().st_size)
    stored = {r.path.relative_to(tmp_path / "results"): r for r in read_results_file(file)}
    kept_run, kept_trial = (stored[f.path.relative_to(tmp_path / "runs")] for f in (run, trial))
    assert set(kept_run.files) == set(KEPT_FILES)
    assert set(kept_trial.files) == {"config.yaml", "status.json", "results.json", "timing_stats.json"}
    assert (kept_run.config(), kept_run.results()) == (run.config(), run.results())
    theirs, ours = scan(tmp_path / "runs"), scan(tmp_path / "results")
    assert [(r.id, r.trial, r.state) for r in ours] == [(r.id, r.trial, r.state) for r in theirs]
    loaded = load_runs(tmp_path / "results")
    assert loaded.warnings == []
    assert [r.result for r in loaded.runs] == [r.result for r in load_runs(tmp_path / "runs").runs]
    with pytest.raises(UsageError, match="not its weights"):
        find_run(tmp_path / "results", "GPT-01")


def test_the_same_runs_give_the_same_bytes_and_kept_results_can_be_kept_again(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    for target in ("one", "two"):
        keep(tmp_path / "runs", tmp_path / target)
    keep(tmp_path / "one", tmp_path / "three")
    contents = {(tmp_path / name / "paper.jsonl.xz").read_bytes() for name in ("one", "two", "three")}
    assert len(contents) == 1


def test_kept_results_are_not_replaced_by_others_or_by_none(tmp_path: Path) -> None:
    config = experiment("GPT-01").at("smoke", 1)
    write_finished_run(run_path(tmp_path / "runs", config), config)
    keep(tmp_path / "runs", tmp_path / "results")
    before = (tmp_path / "results" / "paper.jsonl.xz").read_bytes()
    other = experiment("GPT-01").at("smoke", 2)
    write_finished_run(run_path(tmp_path / "more", other), other)
    again = write_finished_run(run_path(tmp_path / "more", config), config, loss=2.0)
    with pytest.raises(OelmError, match="has other results of GPT-01/scale=smoke/seed=1"):
        keep(tmp_path / "more", tmp_path / "results")
    (again.path / "results.json").unlink()
    again.write_status(Status(state="failed"))
    with pytest.raises(OelmError, match="would lose them"):
        keep(tmp_path / "more", tmp_path / "results")
    assert (tmp_path / "results" / "paper.jsonl.xz").read_bytes() == before


def test_unfinished_runs_and_other_studies_are_left_out(tmp_path: Path) -> None:
    for folder in make_runs(tmp_path / "runs"):
        folder.write_status(Status(state="interrupted"))
    with pytest.raises(OelmError, match="no finished runs"):
        keep(tmp_path / "runs", tmp_path / "results")
    make_runs(tmp_path / "runs", "GPT-02")
    assert keep(tmp_path / "runs", tmp_path / "results", study="paper").runs == 2
    with pytest.raises(OelmError, match="of study gap"):
        keep(tmp_path / "runs", tmp_path / "results", study="gap")
    for target in (tmp_path / "runs", tmp_path / "runs" / "kept"):
        with pytest.raises(OelmError, match="or lies inside it"):
            keep(tmp_path / "runs", target)


def test_a_failed_seed_stays_visible_and_runs_of_other_machines_stay(tmp_path: Path) -> None:
    make_runs(tmp_path / "elsewhere", "GPT-02")
    keep(tmp_path / "elsewhere", tmp_path / "results")
    run, _ = make_runs(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    (run.path / "predictions.json").unlink()
    run.write_status(Status(state="failed", reason="disk"))
    keep(tmp_path / "runs", tmp_path / "results")
    found = {(r.id, r.trial): r for r in scan(tmp_path / "results")}
    assert {id for id, _ in found} == {"GPT-01", "GPT-02"}
    assert found["GPT-01", ""].state == "failed"
    assert not found["GPT-01", ""].reader.exists("predictions.json")


def test_an_earlier_results_file_stays_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    before = {p: p.read_bytes() for p in (tmp_path / "results").iterdir()}

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oelm.files.atomic.os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        keep(tmp_path / "runs", tmp_path / "results")
    assert {p: p.read_bytes() for p in (tmp_path / "results").iterdir()} == before


def test_private_facts_are_left_out(tmp_path: Path) -> None:
    run, _ = make_runs(tmp_path / "runs")
    run.write_status(Status(state="finished", host="my-laptop"))
    machine = {"host": "my-laptop", "cores": 2}
    data = {
        "origin": "local folder /home/me/data/sst2",
        "folder_note": "halves of the file in my home",
        "notes": ["2 bad rows", "see https://a.org/b, 1/2 of 'a/b'"],
    }
    shared = {"origin": "local folder sst2", "notes": data["notes"]}
    command = "OELM_DATA_DIR=/home/me/data oelm run GPT-01 --runs '/home/me/my runs'"
    for manifest, expected in (
        (
            {"command": command, "machine": machine, "data": data},
            {
                "command": "OELM_DATA_DIR=data oelm run GPT-01 --runs 'my runs'",
                "machine": {"cores": 2},
                "data": shared,
            },
        ),
        ({"machine": None, "data": None}, {"machine": None, "data": None}),
    ):
        write_json(run.manifest_file, manifest)
        run.write_checksums()
        keep(tmp_path / "runs", tmp_path / "results")
        (copy,) = (r for r in read_results_file(tmp_path / "results" / "paper.jsonl.xz") if not r.trial)
        assert json.loads(copy.files["manifest.json"]) == expected
        assert "host" not in json.loads(copy.files["status.json"])
    for broken in ("{ half", "[]"):
        run.manifest_file.write_text(broken)
        run.write_checksums()
        keep(tmp_path / "runs", tmp_path / "results")  # the analysis reports it
        (copy,) = (r for r in read_results_file(tmp_path / "results" / "paper.jsonl.xz") if not r.trial)
        assert copy.files["manifest.json"] == broken


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(tmp_path / "runs")
    assert main(["archive", "keep", str(tmp_path / "kept"), "--runs", str(tmp_path / "runs")]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert main(["status", "--runs", str(tmp_path / "kept")]) == 0
    assert "GPT-01" in capsys.readouterr().out


# -- damaged and hostile results files ------------------------------------------------------------

PLACE = "GPT-01/scale=smoke/seed=0"


def packed(text: str) -> bytes:
    return lzma.compress(text.encode())


def one_line(**changes: object) -> bytes:
    files = {"config.yaml": "id: x\n"}
    line = {"run": PLACE, "files": files, "sha256": {"config.yaml": results_file._sha256("id: x\n")}}
    return packed(json.dumps({**line, **changes}) + "\n")


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "not xz": (lambda: b"PK\x03\x04 something", "damaged or not an xz file"),
    "empty": (lambda: b"", "damaged or not an xz file"),
    "cut off": (lambda: one_line()[:-9], "damaged or not an xz file"),
    "data after the end": (lambda: one_line() + b"more", "data after the last run"),
    "no line end": (lambda: packed("{}"), "data after the last run"),
    "not JSON": (lambda: packed("{ half\n"), "line 1: not JSON"),
    "a list": (lambda: packed("[]\n"), "expected a JSON object"),
    "no files": (lambda: one_line(files=None), "expected a JSON object"),
    "a changed file": (lambda: one_line(files={"config.yaml": "id: y\n"}), "has changed"),
    "no hash": (lambda: one_line(sha256={}), "has changed"),
    "a file that is not text": (
        lambda: one_line(files={"config.yaml": 3}),
        "not a text file of a run folder",
    ),
    "a checkpoint": (lambda: one_line(files={"latest.pt": "x"}), "not a text file of a run folder"),
    "a path": (lambda: one_line(files={"../config.yaml": "x"}), "not a text file of a run folder"),
    "a run outside": (lambda: one_line(run="../x/scale=smoke/seed=0"), "not the path of a run"),
    "an unprintable run": (lambda: one_line(run=f"\x1b[2J{PLACE}"), "not the path of a run"),
    "a huge seed": (lambda: one_line(run=PLACE + "0" * 30), "not the path of a run"),
    "one huge line": (lambda: lzma.compress(b"x" * 3_000_000), "refused, because it unpacks"),
    "many lines": (lambda: packed("\n" * 6_000_000), "not JSON|refused, because it unpacks"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_results_file_is_one_error_that_names_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results_file, "MAX_LINE_BYTES", 2_000_000)
    monkeypatch.setattr(results_file, "MAX_BYTES", 5_000_000)
    make, expected = HOSTILE[case]
    (tmp_path / "gap.jsonl.xz").write_bytes(make())
    with pytest.raises(OelmError, match=expected) as caught:
        read_results_file(tmp_path / "gap.jsonl.xz")
    assert "gap.jsonl.xz" in str(caught.value)
    for command in ("status", "analyze"):
        assert main([command, "--runs", str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert "gap.jsonl.xz" in error
        assert "Traceback" not in error


def test_any_flipped_bit_of_a_results_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "gap.jsonl.xz"
    write_results_file(file, {PLACE: {"config.yaml": "id: x\n", "metrics.jsonl": "{}\n" * 50}})
    content = file.read_bytes()
    for at in range(0, len(content), 7):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        file.write_bytes(changed)
        with pytest.raises(OelmError, match=r"gap\.jsonl\.xz"):
            read_results_file(file)


def test_merged_results_continue_as_run_folders_and_nothing_is_overwritten(tmp_path: Path) -> None:
    originals = make_runs(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    file = tmp_path / "results" / "paper.jsonl.xz"
    merged = merge(file, tmp_path / "new")
    assert merged.conflicts == merged.same == []
    for original in originals:
        folder = RunFolder(tmp_path / "new" / original.path.relative_to(tmp_path / "runs"))
        folder.claim(original.config())  # the same config, so the launcher accepts the folder
        assert folder.ended() is not None  # and does not train the run again
        assert folder.results() == original.results()
    assert not list((tmp_path / "new").glob(".*"))
    again = merge(file, tmp_path / "new")
    assert (len(again.same), again.added, again.conflicts) == (2, [], [])
    assert len(merge(file, tmp_path / "runs").same) == 2  # where the results come from
    changed = tmp_path / "new" / originals[0].path.relative_to(tmp_path / "runs") / "results.json"
    changed.write_text("{}")
    assert len(merge(file, tmp_path / "new").conflicts) == 1
    assert changed.read_text() == "{}"


@pytest.mark.parametrize("status", ["{", None])
def test_a_run_whose_state_is_unknown_is_not_left_out_silently(tmp_path: Path, status: str | None) -> None:
    make_runs(tmp_path / "runs")
    other = experiment("GPT-02").at("smoke", 1)
    folder = write_finished_run(run_path(tmp_path / "runs", other), other).path
    (folder / "status.json").unlink()
    if status is not None:
        (folder / "status.json").write_text(status)
    with pytest.raises(OelmError, match=r"would be left out, because its status\.json"):
        keep(tmp_path / "runs", tmp_path / "results")
    folder.rename(folder.with_name("seed=1.bak"))
    with pytest.raises(OelmError, match="is not named seed=<number>"):
        keep(tmp_path / "runs", tmp_path / "results")


def test_a_diverged_run_can_be_merged_twice(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    other = experiment("GPT-02").at("smoke", 1)
    diverged = write_finished_run(run_path(tmp_path / "runs", other), other)
    (diverged.path / "results.json").unlink()
    (diverged.path / "metrics.jsonl").write_text('{"step": 1}\n')
    diverged.write_status(Status(state="diverged"))
    keep(tmp_path / "runs", tmp_path / "results")
    file = tmp_path / "results" / "paper.jsonl.xz"
    assert merge(file, tmp_path / "new").conflicts == []
    again = merge(file, tmp_path / "new")
    assert (len(again.same), again.conflicts) == (3, [])
    place = diverged.path.relative_to(tmp_path / "runs")
    (tmp_path / "new" / place / "metrics.jsonl").write_text("{}")
    assert merge(file, tmp_path / "new").conflicts == [f"{place}/results.json"]


@pytest.mark.parametrize("name", ["...jsonl.xz", "..jsonl.xz", ".hidden.jsonl.xz"])
def test_a_results_file_with_an_unusual_name_is_not_merged(tmp_path: Path, name: str) -> None:
    make_runs(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    file = (tmp_path / "results" / "paper.jsonl.xz").rename(tmp_path / "results" / name)
    with pytest.raises(OelmError, match="rename it"):
        merge(file, tmp_path / "sub" / "new")
    assert not (tmp_path / "sub").exists()


def test_kept_results_are_not_trained_again_in_place(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    with pytest.raises(UsageError, match="oelm archive merge"):
        make_jobs([experiment("GPT-01").at("smoke", 1)], tmp_path / "results")
    assert not (tmp_path / "results" / "paper").exists()


def test_a_results_file_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    file = tmp_path / "results" / "paper.jsonl.xz"
    assert main(["archive", "verify", str(file)]) == 0
    assert "2 runs, 13 files, all hashes match" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-9])
    assert main(["archive", "verify", str(file)]) == 1
    assert main(["archive", "merge", str(file), "--runs", str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()
