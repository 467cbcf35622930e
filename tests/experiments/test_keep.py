"""What a repository keeps of a study: everything its figures are made of, and nothing that is large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oelm.cli.main import main
from oelm.errors import OelmError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.tuning import trial_configs
from oelm.files.atomic import write_json
from oelm.runs.keep import JUDGED, keep
from oelm.runs.scan import scan


def runs_of(root: Path, state: str = "finished", id: str = "GPT-01") -> list[Path]:
    config = experiment(id).at("smoke", 1)
    jobs = make_jobs([config, *trial_configs(config, (1e-3,), (0,))], root)
    for job in jobs:
        write_json(job.folder / "status.json", {"state": state, "heartbeat": 1.0})
        write_json(job.folder / "results.json", {"id": id, "seed": job.config.seed})
        for name in (*JUDGED[3:], "training.log", "latest.pt"):
            if not (job.folder / name).exists():
                (job.folder / name).write_text("{}\n")
    return [job.folder for job in jobs]


def scan_folder(root: Path) -> Iterator[Path]:
    return (run.path for run in scan(root) if not run.trial)


def test_the_copy_reads_like_the_runs_folder_and_holds_no_weights(tmp_path: Path) -> None:
    runs_of(tmp_path / "runs")
    kept = keep(tmp_path / "runs", tmp_path / "results")
    assert kept.runs == 2
    assert set(JUDGED) - {"manifest.json"} == {
        p.name for p in next(scan_folder(tmp_path / "results")).iterdir()
    }
    files = [p for p in (tmp_path / "results").rglob("*") if p.is_file()]
    assert kept.files == len(files)
    assert kept.bytes == sum(p.stat().st_size for p in files)
    assert not {"latest.pt", "training.log"} & {p.name for p in files}
    # of a trial only what the choice of a rate rests on
    assert sorted(p.name for p in files).count("freeze_audit.json") == 1
    theirs, ours = scan(tmp_path / "runs"), scan(tmp_path / "results")
    assert [(run.id, run.trial, run.state) for run in ours] == [
        (run.id, run.trial, run.state) for run in theirs
    ]


def test_unfinished_runs_and_other_studies_are_left_out(tmp_path: Path) -> None:
    runs_of(tmp_path / "runs", "interrupted")
    with pytest.raises(OelmError, match="no finished runs"):
        keep(tmp_path / "runs", tmp_path / "results")
    runs_of(tmp_path / "runs", "finished", "GPT-02")
    assert keep(tmp_path / "runs", tmp_path / "results", study="paper").runs == 2
    with pytest.raises(OelmError, match="of study gap"):
        keep(tmp_path / "runs", tmp_path / "results", study="gap")
    for target in (tmp_path / "runs", tmp_path / "runs" / "kept"):
        with pytest.raises(OelmError, match="itself, or in it"):
            keep(tmp_path / "runs", target)


def test_a_failed_seed_stays_visible_and_an_earlier_copy_leaves_nothing_behind(tmp_path: Path) -> None:
    first, _ = runs_of(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    (first / "predictions.json").unlink()
    write_json(first / "status.json", {"state": "failed", "heartbeat": 1.0, "reason": "disk"})
    keep(tmp_path / "runs", tmp_path / "results")
    place = tmp_path / "results" / first.relative_to(tmp_path / "runs")
    assert not (place / "predictions.json").exists()
    assert {run.state for run in scan(tmp_path / "results")} == {"finished", "failed"}


@pytest.mark.parametrize("moment", ["copyfile", "rename"])
def test_an_earlier_copy_stays_until_the_new_one_is_whole(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_of(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    before = {p: p.read_bytes() for p in (tmp_path / "results").rglob("*") if p.is_file()}

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if moment == "copyfile":
            patch.setattr("oelm.runs.keep.shutil.copyfile", full_disk)
        else:
            real = Path.rename
            patch.setattr(
                Path, "rename", lambda old, new: full_disk() if ".new" in old.name else real(old, new)
            )
        with pytest.raises(OSError, match="No space left"):
            keep(tmp_path / "runs", tmp_path / "results")
    assert {p: p.read_bytes() for p in (tmp_path / "results").rglob("*") if p.is_file()} == before
    keep(tmp_path / "runs", tmp_path / "results")
    assert {p: p.read_bytes() for p in (tmp_path / "results").rglob("*") if p.is_file()} == before


def test_a_copy_that_was_killed_between_two_renames_is_put_back(tmp_path: Path) -> None:
    first, *_ = runs_of(tmp_path / "runs")
    keep(tmp_path / "runs", tmp_path / "results")
    place = tmp_path / "results" / first.relative_to(tmp_path / "runs")
    place.rename(place.with_name(f".{place.name}.old"))
    keep(tmp_path / "runs", tmp_path / "results")
    assert (place / "results.json").is_file()
    assert [p.name for p in place.parent.iterdir() if p.name.startswith(".")] == []


def test_what_was_not_written_for_others_is_left_out(tmp_path: Path) -> None:
    folder, *_ = runs_of(tmp_path / "runs")
    status = {"state": "finished", "heartbeat": 1.0, "host": "my-laptop"}
    write_json(folder / "status.json", status)
    data = {"origin": "o", "notes": ["train: bad rows left out: 2"]}
    private = {**data, "folder_note": "halves of the file in my home"}
    machine = {"host": "my-laptop", "cores": 2}
    write_json(folder / "manifest.json", {"machine": machine, "data": private})
    keep(tmp_path / "runs", tmp_path / "results")
    copy = tmp_path / "results" / folder.relative_to(tmp_path / "runs")
    assert json.loads((copy / "manifest.json").read_text()) == {
        "machine": {"cores": 2},
        "data": data,
    }
    assert "host" not in json.loads((copy / "status.json").read_text())
    assert json.loads((folder / "status.json").read_text()) == status  # the run itself stays
    for odd in ("{ half", "[]", '{"machine": null, "data": {"notes": null}}'):
        (folder / "manifest.json").write_text(odd)
        keep(tmp_path / "runs", tmp_path / "results")  # for the analysis to complain of
        assert "".join((copy / "manifest.json").read_text().split()) == "".join(odd.split())


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_of(tmp_path / "runs")
    assert main(["archive", "keep", str(tmp_path / "kept"), "--runs", str(tmp_path / "runs")]) == 0
    assert "2 runs" in capsys.readouterr().out
