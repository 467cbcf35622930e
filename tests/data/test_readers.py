import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import Dataset
from oelm.data.sources import readers
from oelm.data.sources.clean import clean_row
from oelm.data.sources.readers import cached_sha256, join_articles, pieces, read_rows
from oelm.errors import OelmError

LABELLED = Dataset(name="x", about="", label_names=("no", "yes"), aliases={"text": ("sentence",)})


def rows_of(path: Path, dataset: Dataset | None = None) -> tuple[list[dict], BadRows]:
    bad = BadRows()

    def is_row(row: dict) -> bool:
        return clean_row(dataset, row, "", 0, BadRows()) is not None

    return [row for _, row in read_rows(path, bad, is_row if dataset else None)], bad


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
        assert rows_of(path) == (rows, BadRows()), path


def test_invalid_lines_are_reported_and_the_others_are_read(write_jsonl) -> None:
    path = write_jsonl(
        "bad.jsonl",
        [{"text": "fine"}, '{"text": "cut', b'{"text": "\xff\xfe"}', "[1, 2]", "", {"text": "too"}],
    )
    rows, bad = rows_of(path)
    assert [row["text"] for row in rows] == ["fine", "too"]
    assert bad.counts == {"json": 2, "utf-8": 1}
    summary = str(bad)
    assert f"{path}, row 2" in summary
    assert f"{path}, row 3" in summary
    assert f"{path}, row 4" in summary


def test_csv_rows_with_invalid_utf8_or_too_many_cells_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"text,label\ngood,1\nb\xe4d,0\nx,1,extra\n")
    rows, bad = rows_of(path)
    assert rows == [{"text": "good", "label": "1"}]
    assert bad.counts == {"utf-8": 1, "csv": 1}


def test_two_columns_with_one_name_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("text, text,label,,\nfirst,second,1,,\n", "utf-8")
    with pytest.raises(OelmError, match="two columns with the name 'text'"):
        rows_of(path)
    path.write_text("text,label,,\nfirst,1,,\n", "utf-8")  # empty columns at the end, as spreadsheets write
    assert rows_of(path)[0][0]["text"] == "first"


def test_a_quotation_mark_does_not_merge_rows_of_a_tsv_file(tmp_path: Path) -> None:
    path = tmp_path / "glue.tsv"
    path.write_text('text\tlabel\nfine\t1\n"open quote\t1\nrow three\t0\nends with quote"\t0\n', "utf-8")
    rows, bad = rows_of(path)
    assert rows == [{"text": "fine", "label": "1"}]
    assert "a quotation mark opens a cell that ends lines later" in str(bad)


def test_a_quotation_mark_that_merges_many_rows_of_a_csv_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    lines = ["label,text", *(f"{i % 2},good {i}" for i in range(100))]
    lines[11], lines[91] = '0,"wow 10', '0,what 900"'
    path.write_text("\n".join(lines), "utf-8")
    rows, bad = rows_of(path, LABELLED)
    assert len(rows) == 10 + 9
    assert "this row has 81 lines of the file" in str(bad)
    lines[91] = "0,what 900"  # the mark is never closed
    path.write_text("\n".join(lines), "utf-8")
    rows, bad = rows_of(path, LABELLED)
    assert len(rows) == 10
    assert "this row has 90 lines of the file" in str(bad)


def test_a_cell_of_a_csv_file_may_have_lines_with_commas(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    text = "Dear all,\n\nit was good, really.\nThe end, too.\n\nYours,\nA reader"
    path.write_text(f'label,text\n1,"{text}"\n0,bad\n', "utf-8")
    assert [row["text"] for row in rows_of(path, LABELLED)[0]] == [text, "bad"]


@pytest.mark.parametrize(
    ("header", "line"),
    [("text", "a line"), ("label,text", "one comma, in each line"), ("label,text", "1, 2, 3")],
)
def test_a_cell_of_a_csv_file_may_have_many_equal_lines(tmp_path: Path, header: str, line: str) -> None:
    path = tmp_path / "poems.csv"
    text = "\n".join([line] * 20)
    path.write_text(header + "\n" + "1," * header.count(",") + f'"{text}"\n', "utf-8")
    rows, bad = rows_of(path, LABELLED)
    assert [row["text"] for row in rows] == [text]
    assert not bad


def test_the_header_is_not_a_line_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "reviews.csv"
    rows = "".join(f"{i % 2},good {i}\n" for i in range(6))
    path.write_text(f'label,text\n1,"wow\n{rows}0,the end"\n', "utf-8")
    assert "this row has 8 lines of the file" in str(rows_of(path, LABELLED)[1])


def test_a_damaged_parquet_file_and_an_unknown_extension_are_errors(tmp_path: Path) -> None:
    for name, content, words in (("a.parquet", b"PAR1 nonsense", "parquet"), ("a.docx", b"", "jsonl")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OelmError, match=words):
            rows_of(tmp_path / name)


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
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
def test_a_bad_row_is_reported_with_file_row_and_field(row: dict, kind: str, expected: str) -> None:
    bad = BadRows()
    assert clean_row(LABELLED, row, "train.csv", 7, bad) is None
    assert bad.counts == {kind: 1}
    assert expected in str(bad)
    assert "train.csv, row 7, field" in str(bad)


@pytest.mark.parametrize("label", [1, 1.0, "1", "yes", " YES "])
def test_labels_can_be_numbers_or_names_and_columns_can_have_aliases(label: object) -> None:
    assert clean_row(LABELLED, {"sentence": "a", "label": label}, "f", 1, BadRows()) == {
        "text": "a",
        "label": 1,
    }


@pytest.mark.parametrize("label", [1, 1.0, "1"])
def test_a_number_is_a_class_name_if_all_class_names_are_numbers(label: object) -> None:
    numbered = replace(LABELLED, label_names=("1", "2", "3"))
    assert clean_row(numbered, {"text": "a", "label": label}, "f", 1, BadRows()) == {"text": "a", "label": 0}
    assert clean_row(numbered, {"text": "a", "label": 0}, "f", 1, BadRows()) is None


@pytest.mark.parametrize(("label", "index"), [(1, 0), ("1", 0), (2.0, 1), ("5+", 2), (0, None), (5, None)])
def test_numbers_are_class_names_also_beside_other_class_names(label: object, index: int | None) -> None:
    mixed = replace(LABELLED, label_names=("1", "2", "5+"))
    row = clean_row(mixed, {"text": "a", "label": label}, "f", 1, bad := BadRows())
    assert row == (None if index is None else {"text": "a", "label": index})
    assert bool(bad) == (index is None)
    assert not bad or f"is {label}, not one of 1, 2, 5+\n" in str(bad)


def test_thousands_of_bad_rows_give_one_short_summary() -> None:
    bad = BadRows()
    for row in range(5000):
        clean_row(LABELLED, {"text": "a", "label": -1}, "test.jsonl", row, bad)
    summary = str(bad)
    assert "5,000" in summary
    assert len(summary.splitlines()) < 10


def test_only_the_marker_ends_a_document_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n", encoding="utf-8")
    assert rows_of(path)[0] == [{"text": "one\n\nstill one"}, {"text": "two"}]


@settings(deadline=None)
@given(st.text(st.sampled_from("ab ,.\n中 "), max_size=400), st.integers(3, 40))
def test_pieces_are_short_and_join_to_the_text(text: str, size: int) -> None:
    before, readers.PIECE = readers.PIECE, size
    try:
        parts = list(pieces(text))
    finally:
        readers.PIECE = before
    assert "".join(parts) == text
    assert all(len(part) <= size for part in parts)


def test_a_column_named_continues_does_not_join_documents() -> None:
    bad = BadRows()
    row = clean_row(Dataset(name="x", about=""), {"text": "a", "continues": "no"}, "f", 1, bad)
    assert row == {"text": "a"}


def test_the_pieces_of_a_long_document_keep_the_line_breaks_between_them(tmp_path: Path) -> None:
    document = "\n".join(f"word{i}" for i in range(200_000))
    (tmp_path / "a.txt").write_text(f"\n{document}\n<|endoftext|>\nsecond", encoding="utf-8")
    rows, _ = rows_of(tmp_path / "a.txt")
    assert "".join(row["text"] for row in rows[:-1]) == document
    assert rows[-1]["text"] == "\nsecond"


def test_a_text_file_may_start_with_a_byte_order_mark_and_have_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\r\n<|endoftext|>\r\nthree".encode())
    assert [row["text"] for row in rows_of(tmp_path / "a.txt")[0]] == ["one\ntwo", "\nthree"]


def test_a_long_text_file_is_one_document_in_several_rows(tmp_path: Path) -> None:
    text = "some words and more, " * 60_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    rows, _ = rows_of(tmp_path / "a.txt")
    assert "".join(row["text"] for row in rows) == text
    assert [row.get(readers.CONTINUES, False) for row in rows] == [True] * (len(rows) - 1) + [False]
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
        row["text"] for _, row in join_articles(((i, {"text": line}) for i, line in enumerate(lines, 1)))
    ]
    assert [text.split("\n")[0 if n else 1] for n, text in enumerate(joined)][1] == " = Second = "
    assert len(joined) == 2
    assert " = = Section = = \n more \n" in joined[0]


def test_an_unchanged_file_is_hashed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one", encoding="utf-8")
    first = cached_sha256(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(readers, "file_sha256", lambda _: pytest.fail("read again"))
        assert cached_sha256(path, tmp_path) == first
    path.write_text("other", encoding="utf-8")
    assert cached_sha256(path, tmp_path) != first
