import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oelm.data.sources import readers
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize import chunks, encoding, pool, store
from oelm.data.tokenize.encoding import EncodingProgress
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.data.tokenize.tokens import prepare_tokens
from oelm.errors import OelmError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    corpus = open_corpus("stories").limit(train=200)
    return load_tokenizer("bpe-400", corpus=corpus, cache_dir=tmp_path_factory.mktemp("bpe"))


def expected(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of each document by the Hugging Face tokenizer, each followed by EOS."""
    result: list[int] = []
    for text in texts:
        result += [*tokenizer._inner.encode(text, add_special_tokens=False).ids, tokenizer.eos_id]
    return result


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    texts=st.lists(
        st.text(st.sampled_from("abc \n,é中"), min_size=1).filter(str.strip), min_size=1, max_size=12
    )
)
def test_the_token_file_has_all_documents_in_order(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, write_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_CHARACTERS", 20)  # many chunks, and documents in several pieces
    monkeypatch.setattr(readers, "PIECE", 16)
    path = write_jsonl("train.jsonl", [{"text": text} for text in texts])
    tokens = prepare_tokens(own_lm(path), "train", tokenizer, workers=1)
    assert tokens.ids.tolist() == expected(texts, tokenizer)
    offsets = tokens.offsets
    assert tokens.documents == len(texts)
    for number, text in enumerate(texts):
        ids = tokens.ids[offsets[number] : offsets[number + 1]]
        assert ids.tolist() == expected([text], tokenizer)


def own_lm(train: Path):
    """Return a corpus whose train split is this file."""
    (train.parent / "eval.jsonl").write_text('{"text": "held out"}\n', encoding="utf-8")
    return open_corpus(f"file:{train},{train.parent}/eval.jsonl,{train.parent}/eval.jsonl")


def test_meta_json_describes_the_tokens_and_the_cache_is_used(tokenizer: Tokenizer, monkeypatch) -> None:
    corpus = open_corpus("stories").limit(validation=30)
    tokens = prepare_tokens(corpus, "validation", tokenizer)
    meta = json.loads((tokens.folder / "meta.json").read_text(encoding="utf-8"))
    assert meta["tokenizer"]["hash"] == tokenizer.hash
    assert meta["corpus_hash"] == corpus.fingerprint("validation")
    assert meta["columns"]["ids"] == ["<u2", len(tokens)]
    assert meta["rows"] == 30
    assert not tokens.ids.flags.writeable
    monkeypatch.setattr(type(corpus), "rows", lambda *_: pytest.fail("tokenised again"))
    assert np.array_equal(prepare_tokens(corpus, "validation", tokenizer).ids, tokens.ids)


def test_other_content_another_tokenizer_or_damage_makes_new_tokens(tokenizer: Tokenizer) -> None:
    corpus = open_corpus("stories")
    first = prepare_tokens(corpus.limit(validation=30), "validation", tokenizer)
    other = prepare_tokens(corpus.limit(validation=31), "validation", tokenizer)
    assert first.folder != other.folder
    small = load_tokenizer("bpe-300", corpus=corpus.limit(train=100))
    assert prepare_tokens(corpus.limit(validation=30), "validation", small).folder != first.folder
    whole = first.ids.tolist()
    os.truncate(first.folder / "ids.bin", 10)
    assert prepare_tokens(corpus.limit(validation=30), "validation", tokenizer).ids.tolist() == whole


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["ids.bin", "ends.bin", "meta.json"])
def test_a_flipped_bit_in_the_cache_is_detected_and_the_tokens_are_made_again(
    tokenizer: Tokenizer, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = open_corpus("stories").limit(validation=30)
    first = prepare_tokens(corpus, "validation", tokenizer, cache_dir=tmp_path)
    whole = (first.folder / file).read_bytes()
    flip_bit(first.folder / file, 31)
    again = prepare_tokens(corpus, "validation", tokenizer, cache_dir=tmp_path)
    assert (again.folder / file).read_bytes() == whole
    assert "It is created again" in caplog.text


def test_a_file_that_is_read_in_another_way_is_tokenized_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = [json.dumps({"text": f"story number {i}"}) for i in range(40)]
    (folder / "train.txt").write_text("\n".join(lines))
    for split in ("validation", "test"):
        (folder / f"{split}.jsonl").write_text(lines[0])
    as_text = open_corpus(str(folder))
    content = as_text.fingerprint("train")
    documents = prepare_tokens(as_text, "train", tokenizer).documents
    (folder / "train.txt").rename(folder / "train.jsonl")
    as_rows = open_corpus(str(folder))
    assert prepare_tokens(as_rows, "train", tokenizer).documents > documents
    assert as_rows.fingerprint("train") == content  # the recorded fingerprint does not change


def test_a_damaged_tokenizer_in_the_cache_is_trained_again(tmp_path: Path) -> None:
    corpus = open_corpus("stories").limit(train=50)
    whole = load_tokenizer("bpe-300", corpus=corpus, cache_dir=tmp_path)
    (file,) = (tmp_path / "tokenizers").glob("bpe-300-*/tokenizer.json")
    for damage in (b"{", b"\xff\xfe", file.read_bytes().replace(b'"a":', b'"q":')):
        file.write_bytes(damage)
        assert load_tokenizer("bpe-300", corpus=corpus, cache_dir=tmp_path).hash == whole.hash


@pytest.mark.parametrize("files", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_damaged_tokenizer_files_are_an_error_with_their_folder(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"\xff{")
    with pytest.raises(OelmError, match=f"{tmp_path} are damaged"):
        load_tokenizer(str(tmp_path))


def test_temporary_files_of_a_killed_writer_are_removed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = open_corpus("stories").limit(validation=30)
    stray = tmp_path / "tokens" / ".meta.json.4194303.tmp"
    stray.parent.mkdir()
    stray.write_text("half", encoding="utf-8")
    os.utime(stray, (0, 0))
    prepare_tokens(corpus, "validation", tokenizer, cache_dir=tmp_path)
    assert not stray.exists()


def test_two_workers_give_the_same_tokens_as_one_process(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch
) -> None:
    corpus = open_corpus("stories").limit(train=300)
    alone = prepare_tokens(corpus, "train", tokenizer, workers=1, cache_dir=tmp_path / "a")
    monkeypatch.setattr(chunks, "_CHARACTERS", 10_000)
    monkeypatch.setattr(pool, "_CHUNKS_WITHOUT_WORKERS", 1)
    together = prepare_tokens(corpus, "train", tokenizer, workers=2, cache_dir=tmp_path / "b")
    assert np.array_equal(alone.ids, together.ids)
    assert np.array_equal(alone.offsets, together.offsets)


def test_a_worker_that_dies_is_an_error(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "_CHARACTERS", 5_000)
    monkeypatch.setattr(pool, "_CHUNKS_WITHOUT_WORKERS", 1)
    monkeypatch.setattr(Tokenizer, "to_json", lambda self: ("not json", {}))
    with pytest.raises(OelmError, match="process"):
        prepare_tokens(open_corpus("stories").limit(train=100), "train", tokenizer, workers=2)


def test_progress_has_speed_and_remaining_time(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "_CHARACTERS", 20_000)
    reports = []
    prepare_tokens(open_corpus("stories"), "validation", tokenizer, progress=reports.append, workers=1)
    assert [now.rows for now in reports] == sorted(now.rows for now in reports)
    assert reports[-1].rows == reports[-1].total_rows == 600
    assert reports[-1].share == 1.0
    assert reports[0].eta_seconds is not None
    assert reports[0].eta_seconds > 0
    assert reports[-1].megabytes_per_second > 0


def test_bad_rows_are_one_error_or_are_skipped_and_counted(tokenizer: Tokenizer, write_jsonl) -> None:
    rows: list[object] = [{"text": f"row {i}"} for i in range(50)]
    path = write_jsonl("train.jsonl", [*rows[:10], "{broken", *rows[10:], {"text": ""}, {"words": "x"}])
    corpus = own_lm(path)
    with pytest.raises(OelmError, match="3 bad rows") as error:
        prepare_tokens(corpus, "train", tokenizer)
    assert f"{path}, row 11" in str(error.value)
    assert f"{path}, row 53, field 'text'" in str(error.value)
    tokens = prepare_tokens(corpus, "train", tokenizer, skip_bad_rows=True)
    assert tokens.documents == 50
    assert corpus.skipped == {"train": {"json": 1, "empty": 1, "field": 1}}
    with pytest.raises(
        OelmError, match="3 bad rows"
    ):  # a cache made with skip_bad_rows does not hide the error
        prepare_tokens(corpus, "train", tokenizer)


def test_an_empty_split_is_an_error(tokenizer: Tokenizer, tmp_path: Path, write_jsonl) -> None:
    write_jsonl("data/wikitext2/train.jsonl", [{"text": "a"}])
    for split in ("validation", "test"):
        write_jsonl(f"data/wikitext2/{split}.jsonl", [])
    with pytest.raises(OelmError, match="wikitext2/test has no rows"):
        prepare_tokens(open_corpus("wikitext2", data_dir=tmp_path / "data"), "test", tokenizer)


def test_encoding_resumes_after_a_full_disk(tokenizer: Tokenizer, monkeypatch) -> None:
    corpus = open_corpus("stories").limit(train=200)
    monkeypatch.setattr(chunks, "_CHARACTERS", 20_000)
    monkeypatch.setattr(encoding, "_COMMIT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        append, written = store.StoreWriter.append, []

        def full(self, arrays):
            if len(written) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(arrays)
            append(self, arrays)

        patch.setattr(store.StoreWriter, "append", full)
        with pytest.raises(OelmError, match="disk"):
            prepare_tokens(corpus, "train", tokenizer, workers=1)
    reports: list[EncodingProgress] = []
    tokens = prepare_tokens(corpus, "train", tokenizer, workers=1, progress=reports.append)
    assert reports[0].rows > 25  # encoding resumed after the two committed chunks
    assert tokens.ids.tolist() == expected([row["text"] for row in corpus.rows("train")], tokenizer)


def test_an_unwritable_cache_is_an_error_that_says_what_to_set(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OelmError, match="OELM_CACHE_DIR"):
        prepare_tokens(open_corpus("stories"), "test", tokenizer, cache_dir=tmp_path / "file")


_CHILD = """
    import sys
    import time
    from oelm.data.tokenize import chunks
    from oelm.data.tokenize import encoding
    from oelm.data.sources.open import open_corpus
    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.data.tokenize.tokens import prepare_tokens

    chunks._CHARACTERS, encoding._COMMIT_SECONDS = 20_000, 0.0
    tokenizer = Tokenizer.load(sys.argv[1])
    tokens = prepare_tokens(
        open_corpus("stories").limit(train=400), "train", tokenizer, workers=1,
        progress=lambda now: (print(now.rows, flush=True), time.sleep(float(sys.argv[2]))),
    )
    print("done", len(tokens), flush=True)
"""


def child(tokenizer: Tokenizer, folder: Path, pause: float = 0.0) -> subprocess.Popen[str]:
    tokenizer.save(folder / "tokenizer")
    command = [sys.executable, "-c", textwrap.dedent(_CHILD), str(folder / "tokenizer"), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_is_resumed_and_gives_the_same_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    reference = prepare_tokens(
        open_corpus("stories").limit(train=400), "train", tokenizer, cache_dir=tmp_path / "reference"
    )
    firsts = []
    for lines_to_see in (3, 2, 4):
        process = child(tokenizer, tmp_path, pause=0.2)
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(lines_to_see)]
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=300)
        firsts.append(int(seen[0]))
    assert firsts[1] > firsts[0]  # each process resumed where the one before was killed
    assert firsts[2] > firsts[1]
    tokens = prepare_tokens(open_corpus("stories").limit(train=400), "train", tokenizer)
    assert np.array_equal(tokens.ids, reference.ids)
    assert np.array_equal(tokens.offsets, reference.offsets)
    assert not list(tokens.folder.parent.glob("*.part"))


def test_two_processes_encode_only_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    processes = [child(tokenizer, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    # One process printed only "done n": it waited and used the cache.
    assert min(len(output) for output in outputs) == 2


_BOUNDED = """
    import resource, sys
    from oelm.data.sources.open import open_corpus
    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.data.tokenize.tokens import prepare_tokens

    tokenizer = Tokenizer.load(sys.argv[1])
    corpus = open_corpus(sys.argv[2])
    next(corpus.rows("train"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = prepare_tokens(corpus, "train", tokenizer, workers=1)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, len(tokens), tokens.documents)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_memory_is_bounded(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    """Encode 16 MB of text, as one document or as many, with at most 12 MB of additional memory."""
    size, bound = 16 << 20, 12 << 20
    line = "Mira gave the red kite to Oren and went to the harbour before the rain came. " * 64
    with open(tmp_path / f"train.{kind}", "w", encoding="utf-8") as file:
        while file.tell() < size:
            file.write(line if kind == "txt" else json.dumps({"text": line}) + "\n")
    for split in ("validation", "test"):
        (tmp_path / f"{split}.{kind}").write_text(line if kind == "txt" else json.dumps({"text": line}))
    tokenizer.save(tmp_path / "tokenizer")
    name = ",".join(f"{tmp_path}/{split}.{kind}" for split in ("train", "validation", "test"))
    command = [sys.executable, "-c", textwrap.dedent(_BOUNDED), str(tmp_path / "tokenizer"), f"file:{name}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    taken, tokens, documents = map(int, result.stdout.split())
    assert tokens > size / 8
    assert documents == 1 if kind == "txt" else documents > 1000
    assert taken < bound, f"{taken >> 20} MB"


def test_a_lock_file_of_a_killed_process_does_not_block(tokenizer: Tokenizer, cache: Path) -> None:
    corpus = open_corpus("stories").limit(test=10)
    tokens = prepare_tokens(corpus, "test", tokenizer)
    lock = tokens.folder.with_name(tokens.folder.name + ".lock")
    lock.touch()  # as left by a killed process
    os.truncate(tokens.folder / "ids.bin", 0)
    assert len(prepare_tokens(corpus, "test", tokenizer)) == len(tokens)
