"""The hub source with a fake hub, and with the real `datasets` library on local files."""

import itertools
import shutil
import socket
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from oelm.data import checks
from oelm.data.sources import hub
from oelm.data.sources.open import open_corpus
from oelm.errors import OelmError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Replace the hub by a fake one; return the list of calls to it."""
    calls: list[dict] = []

    def load_dataset(path, name=None, **options):
        calls.append({"path": path, "name": name, **options})
        split, streaming = options["split"], options["streaming"]
        rows = [{"text": f"{split} {i}", "label": i % 2} for i in range(1000)]
        return iter(rows) if streaming else datasets.Dataset.from_list(rows)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub, "reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    answer(monkeypatch, {None: ("abc123", ["README.md", "train.parquet"])})
    return calls


def answer(monkeypatch: pytest.MonkeyPatch, revisions: dict) -> None:
    """Set the revisions of the fake hub: each has a hash and a list of files."""

    def dataset_info(name, revision, timeout):
        sha, files = revisions[revision]
        return SimpleNamespace(sha=sha, siblings=[SimpleNamespace(rfilename=file) for file in files])

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=dataset_info))


def test_a_dataset_is_loaded_at_a_fixed_revision(online: list[dict]) -> None:
    corpus = open_corpus("imdb")
    assert "abc123" in corpus.origin
    assert len(list(corpus.rows("test"))) == 1000
    assert len(list(corpus.rows("train"))) + len(list(corpus.rows("validation"))) == 1000
    assert {call["split"] for call in online} == {"train", "test"}  # never "unsupervised"
    assert all(call["revision"] == "abc123" and not call["streaming"] for call in online)
    assert online[0]["path"] == "stanfordnlp/imdb"


def test_held_out_splits_of_a_stream_are_read_without_reading_all_rows(
    online: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def endless(*_args, **_options):
        nonlocal read
        for number in range(10**9):
            read += 1
            yield {"text": f"page {number}"}

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: endless())
    corpus = open_corpus("openwebtext")
    assert "streamed" in corpus.origin
    held = list(corpus.rows("validation"))
    assert 3500 < len(held) < 4500
    assert read <= 200_001


def test_a_check_reads_only_the_first_rows_of_a_stream(
    online: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = ({"text": f"page {number}"} for number in itertools.count())
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: endless)
    monkeypatch.setattr(checks, "_STREAM_ROWS", 50)
    report = checks.check_corpus(open_corpus("tinystories"), find_shared=False)
    assert report.splits["train"].rows == 50
    assert any("when they are tokenised" in warning for warning in report.warnings)


def test_a_limited_stream_stops_early(online: list[dict]) -> None:
    corpus = open_corpus("tinystories").limit(train=5)
    assert len(list(corpus.rows("train"))) == 5
    assert online[-1]["streaming"]


def test_a_variant_selects_configuration_and_split(online: list[dict]) -> None:
    open_corpus("xnli", variant="es").source.fingerprint("train")
    next(iter(open_corpus("mnli", variant="mismatched").source.rows("test", None)))  # type: ignore[arg-type]
    assert online[-1] | {"revision": 0} == {
        "path": "nyu-mll/glue",
        "name": "mnli",
        "data_dir": None,
        "split": "validation_mismatched",
        "streaming": False,
        "revision": 0,
    }
    assert open_corpus("xnli", variant="es").source.config == "es"  # type: ignore[attr-defined]


def test_the_parquet_branch_is_used_for_a_repository_with_a_script(
    online: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = [".gitattributes", "plain_text/partial-train/0000.parquet"]
    script = {None: ("abc123", ["openwebtext.py"]), hub._PARQUET_BRANCH: ("fed987", converted)}
    answer(monkeypatch, script)
    corpus = open_corpus("openwebtext").limit(train=5)
    assert "fed987" in corpus.origin
    assert len(list(corpus.rows("train"))) == 5
    call = online[-1]
    assert (call["name"], call["data_dir"], call["revision"]) == (None, "plain_text", "fed987")
    answer(monkeypatch, {**script, hub._PARQUET_BRANCH: ("fed987", [".gitattributes"])})
    with pytest.raises(OelmError, match="dataset script, which is not executed"):
        open_corpus("openwebtext")


def test_the_fingerprint_depends_on_the_revision(online: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_corpus("imdb").fingerprint("train")
    assert open_corpus("imdb").fingerprint("train") == first
    answer(monkeypatch, {None: ("def456", [])})
    assert open_corpus("imdb").fingerprint("train") != first


def test_without_network_the_error_comes_at_once_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args, **_options):
        raise OSError("unreachable")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **o: pytest.fail("the hub was called"))
    with pytest.raises(OelmError, match="OELM_DATA_DIR") as error:
        open_corpus("agnews")
    assert "builtin" in str(error.value)


def test_offline_without_a_cached_copy_is_an_error() -> None:
    with pytest.raises(OelmError, match="OELM_DATA_DIR"):
        open_corpus("agnews")


def test_a_broken_connection_is_an_error_with_the_row_number(
    online: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(*_args, **_options):
        yield {"text": "a", "label": 0}
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: breaking())
    with pytest.raises(OelmError, match="after row 1"):
        list(open_corpus("tinystories").rows("train"))


def test_the_real_library_reads_a_repository_of_parquet_files(
    online: list[dict], monkeypatch: pytest.MonkeyPatch, tmp_path, tmp_path_factory
) -> None:
    """Load local files with the real `datasets` library, streamed and not streamed."""
    real = datasets.load.load_dataset
    rows = [{"text": f"story {i}", "label": i % 2} for i in range(300)]
    for split in ("train", "validation", "test"):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / f"{split}-00000-of-00001.parquet"
        )
    cache = tmp_path_factory.mktemp("hf")

    converted = tmp_path / "plain_text" / "partial-train"
    converted.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), converted / "0000.parquet")

    def local(path, name=None, *, revision, **options):
        return real(str(tmp_path), cache_dir=str(cache), **options)

    monkeypatch.setattr(datasets, "load_dataset", local)
    files = ["plain_text/partial-train/0000.parquet"]
    answer(monkeypatch, {None: ("abc", ["openwebtext.py"]), hub._PARQUET_BRANCH: ("fed", files)})
    assert len(list(open_corpus("openwebtext").limit(train=280).rows("train"))) == 280
    shutil.rmtree(tmp_path / "plain_text")
    answer(monkeypatch, {None: ("abc", [])})
    for name in ("tinystories", "imdb"):  # streamed, not streamed
        corpus = open_corpus(name)
        assert len(list(corpus.rows("test"))) == 300
        assert len(list(corpus.rows("train"))) + len(list(corpus.rows("validation"))) == 300
