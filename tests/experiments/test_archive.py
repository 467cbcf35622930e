"""Packing and merging: bytes kept, nothing overwritten, nothing written outside, damage noticed."""

from __future__ import annotations

import io
import json
import tarfile
import time
from pathlib import Path

import pytest

from oelm.atomic import write_json
from oelm.errors import OelmError
from oelm.experiments.archive import INDEX, merge, pack, sha256, verify
from oelm.experiments.catalogue import experiment
from oelm.experiments.disk import free, freeable
from oelm.experiments.launch import prepare
from oelm.experiments.lock import RunLock


def finished(root: Path, *seeds: int, id: str = "GPT-01") -> list[Path]:
    folders = []
    for job in prepare([experiment(id).at("smoke", seed) for seed in seeds], root):
        folder = job.folder
        write_json(folder / "status.json", {"state": "finished", "heartbeat": time.time()})
        write_json(folder / "results.json", {"id": id, "seed": job.config.seed})
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        (folder / "training.log").write_text("done\n")
        for name in ("latest.pt", "previous.pt", "lock"):
            (folder / name).write_bytes(b"x" * 1000)
        (folder / "best").mkdir()
        (folder / "best" / "model.safetensors").write_bytes(b"w" * 5000)
        folders.append(folder)
    return folders


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_results_travel_and_weights_stay_unless_asked(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0, 1)
    made = pack(tmp_path / "a", tmp_path / "x.tar.gz")
    assert made.runs == 2
    merged = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert merged.conflicts == merged.same == []
    sent, got = tree(tmp_path / "a"), tree(tmp_path / "b")
    names = {Path(name).name for name in got}
    assert names == {"config.yaml", "status.json", "results.json", "metrics.jsonl", "training.log"}
    assert all(sent[name] == content for name, content in got.items())
    pack(tmp_path / "a", tmp_path / "w.tar.gz", weights=True)
    merge(tmp_path / "w.tar.gz", tmp_path / "c")
    assert any(name.endswith("best/model.safetensors") for name in tree(tmp_path / "c"))
    assert not any(name.endswith((".pt", "lock")) for name in tree(tmp_path / "c"))


def test_the_same_results_make_the_same_archive(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0)
    for name in ("1.tar.gz", "2.tar.gz"):
        pack(tmp_path / "a", tmp_path / name)
    assert sha256(tmp_path / "1.tar.gz") == sha256(tmp_path / "2.tar.gz")


def test_merging_overwrites_nothing_and_names_conflicts(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0, 1)
    (mine,) = finished(tmp_path / "b", 0)
    (mine / "results.json").write_text("my own")
    pack(tmp_path / "a", tmp_path / "x.tar.gz")
    merged = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert any(name.endswith("seed=0/results.json") for name in merged.conflicts)
    assert (mine / "results.json").read_text() == "my own"
    assert any(name.endswith("seed=1/results.json") for name in merged.added)
    again = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert again.added == []
    assert again.conflicts == merged.conflicts


def test_a_run_that_differs_gets_nothing_of_the_archives(tmp_path: Path) -> None:
    """Merged half-way, then finished on the cluster: its results must not land beside the old status."""
    finished(tmp_path / "a", 0, 1)
    (mine,) = finished(tmp_path / "b", 0)
    write_json(mine / "status.json", {"state": "interrupted", "heartbeat": 1.0})
    (mine / "results.json").unlink()
    pack(tmp_path / "a", tmp_path / "x.tar.gz")
    merged = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert [Path(name).name for name in merged.conflicts] == ["status.json"]
    assert [Path(name).name for name in merged.withheld] == ["results.json"]
    assert not (mine / "results.json").exists()
    assert (mine.parent / "seed=1" / "results.json").exists()


def test_nothing_is_merged_into_a_run_that_is_being_worked_on(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0)
    pack(tmp_path / "a", tmp_path / "x.tar.gz")
    (job,) = prepare([experiment("GPT-01").at("smoke", 0)], tmp_path / "b")
    with RunLock(job.folder):
        merged = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert "being worked on" in merged.conflicts[0]
    assert merged.added == []
    assert not (job.folder / "results.json").exists()
    assert merge(tmp_path / "x.tar.gz", tmp_path / "b").conflicts == []


@pytest.mark.parametrize("place", [0.2, 0.5, 0.9])
def test_a_damaged_archive_is_refused_before_anything_is_written(tmp_path: Path, place: float) -> None:
    finished(tmp_path / "a", 0)
    archive = tmp_path / "x.tar.gz"
    pack(tmp_path / "a", archive)
    data = bytearray(archive.read_bytes())
    data[int(len(data) * place)] ^= 0xFF
    archive.write_bytes(data)
    with pytest.raises(OelmError):
        merge(archive, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    archive.write_bytes(data[: len(data) // 2])
    with pytest.raises(OelmError):
        verify(archive)


def forged(
    path: Path, name: str, content: bytes = b"evil", link: str = "", listed: str | None = None
) -> Path:
    """An archive made by hand: one member `name`, with an index that lists it (or `listed`) with its hash."""
    import hashlib

    entry = {"path": listed or name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    index = json.dumps({"format": 1, "runs": 1, "files": [entry]}).encode()
    with tarfile.open(path, "w:gz") as tar:
        for member, data in ((INDEX, index), (name, content)):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            if link and member == name:
                info.type, info.linkname, info.size = tarfile.SYMTYPE, link, 0
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "a\\..\\evil", "evil"])
def test_no_path_leads_out_of_the_runs_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(OelmError, match="outside"):
        merge(forged(tmp_path / "x.tar.gz", name), tmp_path / "deep" / "runs")
    assert tree(tmp_path / "deep") == {}


def test_links_and_unlisted_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OelmError, match="does not list"):
        merge(forged(tmp_path / "l.tar.gz", "s/evil", b"", link="/etc/passwd"), tmp_path / "runs")
    with pytest.raises(OelmError, match="does not list"):
        merge(forged(tmp_path / "u.tar.gz", "s/evil", listed="s/other"), tmp_path / "runs")
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "s").symlink_to(tmp_path)
    with pytest.raises(OelmError, match="link"):
        merge(forged(tmp_path / "t.tar.gz", "s/evil"), tmp_path / "runs")
    assert not (tmp_path / "evil").exists()


def test_what_still_runs_is_not_packed(tmp_path: Path) -> None:
    (folder,) = finished(tmp_path / "a", 0)
    write_json(folder / "status.json", {"state": "running", "host": "elsewhere", "heartbeat": time.time()})
    with pytest.raises(OelmError, match="still running"):
        pack(tmp_path / "a", tmp_path / "x.tar.gz")
    with pytest.raises(OelmError, match="no runs"):
        pack(tmp_path / "a", tmp_path / "x.tar.gz", study="gap")
    assert not (tmp_path / "x.tar.gz").exists()


def test_cleaning_frees_checkpoints_of_finished_runs_only(tmp_path: Path) -> None:
    done, going, locked = finished(tmp_path, 0, 1, 2)
    write_json(going / "status.json", {"state": "interrupted", "heartbeat": time.time()})
    items = freeable(tmp_path)
    assert {item.run.path for item in items} == {done, locked}
    assert sum(item.bytes for item in items) == 4000
    with RunLock(locked):
        assert free(items) == 2000
    assert not (done / "latest.pt").exists()
    assert (done / "best" / "model.safetensors").exists()
    assert (done / "results.json").exists()
    assert (going / "latest.pt").exists()
    assert (locked / "latest.pt").exists()
