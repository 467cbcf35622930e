"""Packing and merging: bytes kept, nothing overwritten, nothing written outside, damage noticed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.cli.main import main
from oelm.errors import OelmError
from oelm.experiments.catalogue import experiment
from oelm.experiments.launch.jobs import make_jobs
from oelm.files.atomic import write_json
from oelm.files.checksums import file_sha256, write_checksums
from oelm.files.read import MIB
from oelm.runs.archives import archive
from oelm.runs.archives import merge as merging
from oelm.runs.archives.archive import INDEX, pack, parse_index, verify
from oelm.runs.archives.merge import merge
from oelm.runs.disk import free, freeable
from oelm.runs.lock import RunLock
from oelm.runs.scan import scan


def finished(root: Path, *seeds: int, id: str = "GPT-01") -> list[Path]:
    folders = []
    for job in make_jobs([experiment(id).at("smoke", seed) for seed in seeds], root):
        folder = job.folder
        write_json(folder / "status.json", {"state": "finished", "heartbeat": time.time()})
        write_json(folder / "results.json", {"id": id, "seed": job.config.seed})
        write_checksums(folder, ["results.json"])
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


def test_an_archive_holds_results_and_weights_only_on_request(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0, 1)
    made = pack(tmp_path / "a", tmp_path / "x.tar.gz")
    assert made.runs == 2
    merged = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert merged.conflicts == merged.same == []
    sent, got = tree(tmp_path / "a"), tree(tmp_path / "b")
    names = {Path(name).name for name in got}
    assert names == {
        "config.yaml",
        "status.json",
        "results.json",
        "metrics.jsonl",
        "training.log",
        "checksums.json",
    }
    assert all(sent[name] == content for name, content in got.items())
    pack(tmp_path / "a", tmp_path / "w.tar.gz", weights=True)
    merge(tmp_path / "w.tar.gz", tmp_path / "c")
    assert any(name.endswith("best/model.safetensors") for name in tree(tmp_path / "c"))
    assert not any(name.endswith((".pt", "lock")) for name in tree(tmp_path / "c"))


def test_the_same_results_make_the_same_archive(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0)
    first, second = tmp_path / "1.tar.gz", tmp_path / "new" / "folder" / "2.tar.gz"
    for target in (first, second):
        pack(tmp_path / "a", target)
    assert file_sha256(first) == file_sha256(second)


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
    (job,) = make_jobs([experiment("GPT-01").at("smoke", 0)], tmp_path / "b")
    with RunLock(job.folder):
        merged = merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert "another process is working on this run" in merged.conflicts[0]
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


RUN = "paper/GPT-01/scale=smoke/seed=0"


def forged(
    path: Path,
    name: str = f"{RUN}/training.log",
    content: bytes = b"evil",
    *,
    index: object = None,
    times: int = 1,
    **member: Any,
) -> Path:
    """An archive made by hand: one member `name` and an index that lists it with its hash, or `index`."""
    entry = {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    wanted = {"format": 1, "runs": 1, "files": [entry]} if index is None else index
    listed = wanted if isinstance(wanted, bytes) else json.dumps(wanted).encode()
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(INDEX)
        info.size = len(listed)
        tar.addfile(info, io.BytesIO(listed))
        for _ in range(times):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in member.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/tmp/evil",
        "a/../../evil",
        "evil",
        f"{RUN}/../../../../../evil/results.json",
        "a\\b/X/scale=smoke/seed=0/results.json",
        ".git/hooks/scale=smoke/seed=0/results.json",
        "paper/X\x1b[2J/scale=smoke/seed=0/results.json",
        "paper/X\n/scale=smoke/seed=0/results.json",
        f"{RUN}/latest.pt",
        f"{RUN}/lock",
        f"{RUN}/lock.owner",
        f"{RUN}/slurm_job",
        f"{RUN}/.git/hooks/post-checkout",
        f"{RUN}/best/model.pt",
        f"{RUN}/best/modeling_evil.py",
        f"{RUN}/best/pytorch_model.bin",
        f"{RUN}/best/deeper/config.json",
        f"{RUN}/best/.hidden.json",
        ".slurm/1/scale=smoke/seed=0/1_submitted.pkl",
        "",
        f"{RUN}/{'x' * 5000}",
        "/".join(["x"] * 3000),
    ],
)
def test_only_files_of_run_folders_are_accepted(tmp_path: Path, name: str) -> None:
    with pytest.raises(OelmError, match="is not a file of a run folder"):
        merge(forged(tmp_path / "x.tar.gz", name), tmp_path / "deep" / "runs")
    assert not (tmp_path / "deep").exists()


def listed(**changes: object) -> dict[str, object]:
    return {"path": f"{RUN}/status.json", "bytes": 1, "sha256": "0" * 64, **changes}


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (b"[" * 100_000, "nested deeper"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{}", "reads only format 1"),
        (b"[]", "reads only format 1"),
        ({"format": 1}, "the field 'files' is missing"),
        ({"format": 1, "files": {}}, "files: expected a list"),
        ({"format": 1, "files": [None]}, r"files\[0\]: expected a mapping"),
        ({"format": 1, "files": [listed(path=1)]}, r"files\[0\]\.path: expected text"),
        ({"format": 1, "files": [listed(bytes=-1)]}, "has an invalid"),
        ({"format": 1, "files": [listed(bytes=True)]}, "expected a whole number"),
        ({"format": 1, "files": [listed(sha256="../x")]}, "has an invalid"),
        ({"format": 1, "files": [listed(), listed()]}, "twice"),
        ({"format": 1, "files": [listed(bytes=10**9)]}, "the limit is"),
        ({"format": 1, "files": []}, "does not list"),
    ],
)
def test_a_malformed_index_is_one_error(
    tmp_path: Path, index: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = forged(tmp_path / "x.tar.gz", index=index)
    with pytest.raises(OelmError, match=said):
        merge(archive, tmp_path / "runs")
    assert main(["archive", "verify", str(archive)]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@given(st.binary(max_size=200))
def test_any_index_is_read_or_refused(content: bytes) -> None:
    message = ""
    try:
        parse_index(content, "x.tar.gz")
    except OelmError as error:
        message = str(error)
    assert not message or "x.tar.gz" in message


def test_links_devices_and_unlisted_members_are_refused(tmp_path: Path) -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
    for i, kind in enumerate(kinds):
        archive = forged(tmp_path / f"{i}.tar.gz", content=b"", type=kind, linkname="/etc/passwd")
        with pytest.raises(OelmError, match="does not list as a file"):
            merge(archive, tmp_path / "runs")
    with pytest.raises(OelmError, match="does not list as a file"):
        merge(forged(tmp_path / "twice.tar.gz", times=2), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_merge_does_not_write_through_links_of_the_runs_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "paper").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OelmError, match="is a symbolic link"):
        merge(forged(tmp_path / "t.tar.gz"), tmp_path / "runs")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")  # the folder itself may be one, on a larger disk
    assert merge(forged(tmp_path / "t.tar.gz"), tmp_path / "linked").added == [f"{RUN}/training.log"]


def test_archives_that_unpack_to_far_more_than_they_are_get_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_ALWAYS_ALLOWED", MIB)
    log = forged(tmp_path / "log.tar.gz", content=bytes(3 * MIB))
    with pytest.raises(OelmError, match="would unpack to"):
        merge(log, tmp_path / "runs")
    monkeypatch.setattr(archive, "_INDEX_BYTES", 1000)
    with pytest.raises(OelmError, match="its index is larger"):
        verify(forged(tmp_path / "index.tar.gz", index=b" " * 2000))
    # a header of a member may be as large as it likes, and tarfile reads it into memory
    long_name = forged(tmp_path / "name.tar.gz", pax_headers={"comment": "x" * 3 * MIB})
    with pytest.raises(OelmError, match="larger than its index says"):
        verify(long_name)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bytes": 3}, "does not have the size"),
        ({"sha256": "0" * 64}, "does not have the hash"),
        ({"path": f"{RUN}/console.log"}, "does not list as a file"),
    ],
)
def test_members_must_be_those_of_the_index(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    entry = {"path": f"{RUN}/training.log", "bytes": 4, "sha256": hashlib.sha256(b"evil").hexdigest()}
    index = {"format": 1, "files": [entry | changes]}
    with pytest.raises(OelmError, match=said):
        merge(forged(tmp_path / "x.tar.gz", index=index), tmp_path / "runs")
    with pytest.raises(OelmError, match=f"incomplete: '{RUN}/status.json' is missing"):
        merge(
            forged(tmp_path / "y.tar.gz", index={"format": 1, "files": [entry, listed()]}), tmp_path / "runs"
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive" * 100, gzip.compress(b""), gzip.compress(bytes(range(256)) * 100)],
    ids=["empty", "text", "gzip of nothing", "gzip of bytes"],  # a gzip holds the time: no id of a test
)
def test_a_file_that_is_no_archive_is_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(OelmError, match=r"x\.tar\.gz"):
        verify(tmp_path / "x.tar.gz")


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging.shutil, "disk_usage", lambda path: SimpleNamespace(free=3))
    with pytest.raises(OelmError, match="the archive needs"):
        merge(forged(tmp_path / "x.tar.gz"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_merge_that_was_killed_leaves_whole_runs_and_its_leftovers_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(tmp_path / "a", 0, 1)
    pack(tmp_path / "a", tmp_path / "x.tar.gz")
    real, done = merging._merge_run, []

    def killed(*args: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(real(*args))

    with monkeypatch.context() as patch:
        patch.setattr(merging, "_merge_run", killed)
        patch.setattr(merging.shutil, "rmtree", lambda *args, **options: None)
        with pytest.raises(KeyboardInterrupt):
            merge(tmp_path / "x.tar.gz", tmp_path / "b")
    assert len(list((tmp_path / "b").glob(".merge-*"))) == 1
    (run,) = scan(tmp_path / "b")
    assert len(list(run.path.iterdir())) == 6  # as a whole
    other = tmp_path / "b" / ".merge-in-progress"
    with RunLock(other):
        assert len(merge(tmp_path / "x.tar.gz", tmp_path / "b").added) == 6
        assert list((tmp_path / "b").glob(".merge-*")) == [other]


def test_files_that_are_no_results_are_not_packed(tmp_path: Path) -> None:
    (folder,) = finished(tmp_path / "a", 0)
    for name in ("slurm_job", "split.json", "core", "best/training_args.bin", ".wandb.step"):
        (folder / name).write_text("x")
    pack(tmp_path / "a", tmp_path / "x.tar.gz", weights=True)
    merge(tmp_path / "x.tar.gz", tmp_path / "b")
    names = {Path(name).name for name in tree(tmp_path / "b")}
    assert not names & {"slurm_job", "split.json", "core", "training_args.bin", ".wandb.step"}
    assert {"model.safetensors", "results.json"} <= names


def test_what_still_runs_is_not_packed(tmp_path: Path) -> None:
    (folder,) = finished(tmp_path / "a", 0)
    write_json(folder / "status.json", {"state": "running", "host": "elsewhere", "heartbeat": time.time()})
    with pytest.raises(OelmError, match="still running"):
        pack(tmp_path / "a", tmp_path / "x.tar.gz")
    with pytest.raises(OelmError, match="no run folders"):
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
