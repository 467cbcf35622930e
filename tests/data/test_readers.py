import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.catalogue import Dataset
from oelm.data.problems import Problems
from oelm.data.sources import readers
from oelm.data.sources.readers import articles, clean, file_sha256, pieces, read_rows
from oelm.errors import OelmError

LABELLED = Dataset(name="x", about="", label_names=("no", "yes"), aliases={"text": ("sentence",)})


def rows_of(path: Path) -> tuple[list[dict], Problems]:
    problems = Problems()
    return [row for _, row in read_rows(path, problems)], problems


def test_jsonl_csv_tsv_and_parquet_give_the_same_rows(tmp_path: Path, write_jsonl) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": 'a "b", c\nd', "label": "1"}, {"text": "ü" * 200_000, "label": "0"}]
    paths = [write_jsonl("a.jsonl", rows)]
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        paths.append(tmp_path / f"a.{suffix}")
        with open(paths[-1], "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    paths.append(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[-1])
    for path in paths:
        assert rows_of(path) == (rows, Problems()), path


def test_broken_lines_are_named_and_the_rest_is_read(write_jsonl) -> None:
    path = write_jsonl(
        "bad.jsonl",
        [{"text": "fine"}, '{"text": "cut', b'{"text": "\xff\xfe"}', "[1, 2]", "", {"text": "too"}],
    )
    rows, problems = rows_of(path)
    assert [row["text"] for row in rows] == ["fine", "too"]
    assert problems.counts == {"json": 2, "utf-8": 1}
    told = str(problems)
    assert f"{path}, row 2" in told
    assert f"{path}, row 3" in told
    assert f"{path}, row 4" in told


def test_csv_with_broken_utf8_and_ragged_rows(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"text,label\ngood,1\nb\xe4d,0\nx,1,extra\n")
    rows, problems = rows_of(path)
    assert rows == [{"text": "good", "label": "1"}]
    assert problems.counts == {"utf-8": 1, "csv": 1}


def test_a_damaged_parquet_file_and_a_foreign_kind_are_clear_errors(tmp_path: Path) -> None:
    for name, content, words in (("a.parquet", b"PAR1 nonsense", "parquet"), ("a.docx", b"", "jsonl")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OelmError, match=words):
            rows_of(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "kind", "says"),
    [
        ({"text": "a", "label": -1}, "label", "-1"),
        ({"text": "a", "label": 2}, "label", "0..1"),
        ({"text": "a", "label": "maybe"}, "label", "no, yes"),
        ({"text": "a", "label": None}, "label", "None"),
        ({"text": "a", "label": True}, "label", "True"),
        ({"text": "a", "label": float("nan")}, "label", "nan"),
        ({"text": "a", "label": 0.5}, "label", "0.5"),
        ({"text": " \n", "label": 1}, "empty", "empty"),
        ({"text": None, "label": 1}, "empty", "empty"),
        ({"text": 7, "label": 1}, "field", "int"),
        ({"text": "\ud800", "label": 1}, "utf-8", "surrogate"),
        ({"body": "a", "label": 1}, "field", "body, label"),
        ({"text": "a"}, "field", "text"),
    ],
)
def test_bad_rows_say_what_is_wrong_and_where(row: dict, kind: str, says: str) -> None:
    problems = Problems()
    assert clean(LABELLED, row, "train.csv", 7, problems) is None
    assert problems.counts == {kind: 1}
    assert says in str(problems)
    assert "train.csv, row 7, field" in str(problems)


@pytest.mark.parametrize("label", [1, 1.0, "1", "yes", " YES "])
def test_labels_may_be_numbers_or_names_and_fields_may_be_renamed(label: object) -> None:
    assert clean(LABELLED, {"sentence": "a", "label": label}, "f", 1, Problems()) == {"text": "a", "label": 1}


def test_thousands_of_bad_rows_are_one_short_summary() -> None:
    problems = Problems()
    for row in range(5000):
        clean(LABELLED, {"text": "a", "label": -1}, "test.jsonl", row, problems)
    told = str(problems)
    assert "5,000" in told
    assert len(told.splitlines()) < 10


def test_text_files_end_documents_at_the_marker_only(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n", encoding="utf-8")
    assert rows_of(path)[0] == [{"text": "one\n\nstill one"}, {"text": "two"}]


@settings(deadline=None)
@given(st.text(st.sampled_from("ab ,.\n中 "), max_size=400), st.integers(3, 40))
def test_pieces_join_to_the_text_and_are_bounded(text: str, size: int) -> None:
    before, readers.PIECE = readers.PIECE, size
    try:
        parts = list(pieces(text))
    finally:
        readers.PIECE = before
    assert "".join(parts) == text
    assert all(len(part) <= size for part in parts)


def test_a_long_text_file_comes_in_pieces_of_one_document(tmp_path: Path) -> None:
    text = "some words and more, " * 60_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    rows, _ = rows_of(tmp_path / "a.txt")
    assert "".join(row["text"] for row in rows) == text
    assert [row.get("continues", False) for row in rows] == [True] * (len(rows) - 1) + [False]
    assert max(len(row["text"]) for row in rows) <= 2 * readers.PIECE


def test_wikitext_lines_become_articles() -> None:
    lines = [
        "",
        " = First = \n",
        "",
        " text . \n",
        " = = Section = = \n",
        " more \n",
        "",
        " = Second = \n",
        " end \n",
    ]
    joined = [
        row["text"] for _, row in articles(((i, {"text": line}) for i, line in enumerate(lines, 1)), "text")
    ]
    assert [text.split("\n")[0 if n else 1] for n, text in enumerate(joined)][1] == " = Second = "
    assert len(joined) == 2
    assert " = = Section = = \n more \n" in joined[0]


def test_a_changed_file_has_another_hash_and_an_unchanged_one_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    first = file_sha256(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(readers, "_open", lambda _: pytest.fail("read again"))
        assert file_sha256(path, tmp_path) == first
    path.write_text("other")
    assert file_sha256(path, tmp_path) != first
