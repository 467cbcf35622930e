from pathlib import Path

import pytest

from oelm.data.checks import check_corpus
from oelm.data.sources.open import open_corpus
from oelm.data.splits import Holdout, find_duplicates, text_key


def rows(count: int, start: int = 0) -> list[dict]:
    return [{"text": f"row {start + i}", "label": i % 2} for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path, write_jsonl) -> Path:
    for split, start in (("train", 0), ("validation", 1000), ("test", 2000)):
        write_jsonl(f"data/imdb/{split}.jsonl", rows(40, start))
    return tmp_path / "data"


def test_valid_data_has_no_errors(folder: Path) -> None:
    report = check_corpus(open_corpus("imdb", data_dir=folder), batch_size=16)
    assert report.ok
    assert report.splits["train"].labels == {0: 20, 1: 20}
    assert "no errors" in str(report)
    assert "neg: 20, pos: 20" in str(report)  # names show at once if the classes are swapped
    assert report.to_dict()["duplicates"] == {
        "validation in test": 0,
        "train in test": 0,
        "train in validation": 0,
    }


def test_withheld_labels_are_reported_in_one_short_summary(folder: Path, write_jsonl) -> None:
    path = write_jsonl("data/imdb/test.jsonl", [{"text": f"t {i}", "label": -1} for i in range(3000)])
    report = check_corpus(open_corpus("imdb", data_dir=folder))
    assert not report.ok
    summary = str(report)
    assert "3,000 x label" in summary
    assert f"{path}, row 1, field 'label': is -1" in summary
    assert "withheld" in summary
    assert len(summary.splitlines()) < 20


def test_bad_rows_can_be_skipped_but_a_split_without_good_rows_is_an_error(folder: Path, write_jsonl) -> None:
    write_jsonl("data/imdb/train.jsonl", [*rows(20), {"text": "", "label": 0}])
    assert check_corpus(open_corpus("imdb", data_dir=folder), skip_bad_rows=True).ok
    write_jsonl("data/imdb/test.jsonl", [{"text": "t", "label": -1}])
    report = check_corpus(open_corpus("imdb", data_dir=folder), skip_bad_rows=True)
    assert report.errors == ["test has no valid rows"]


def test_too_few_rows_for_a_batch_and_missing_classes_are_reported(folder: Path, write_jsonl) -> None:
    write_jsonl("data/imdb/validation.jsonl", [{"text": "only", "label": 1}])
    report = check_corpus(open_corpus("imdb", data_dir=folder), batch_size=64)
    assert [error for error in report.errors if "40 rows, fewer than one batch of 64" in error]
    assert [warning for warning in report.warnings if "no row of class neg" in warning]


def test_train_rows_of_one_class_are_an_error(folder: Path, write_jsonl) -> None:
    write_jsonl("data/imdb/train.jsonl", [{"text": f"row {i}", "label": 1} for i in range(20)])
    report = check_corpus(open_corpus("imdb", data_dir=folder))
    assert report.errors == ["all rows of train have the same class: add rows of another class"]


def test_a_train_split_too_small_to_hold_rows_out_names_the_file_to_add(write_jsonl) -> None:
    path = write_jsonl("small/train.jsonl", rows(2))
    report = check_corpus(open_corpus(str(path.parent)))
    assert "test has no valid rows: train is too small; add a file test.jsonl" in report.errors


def test_the_error_of_a_missing_split_says_what_to_do(tmp_path: Path, write_jsonl) -> None:
    write_jsonl("data/wikitext103/validation.jsonl", [{"text": "a"}])
    write_jsonl("data/wikitext103/test.jsonl", [{"text": "b"}])
    report = check_corpus(open_corpus("wikitext103", data_dir=tmp_path / "data"))
    assert any("add a file train.jsonl; or use source 'hub'" in error for error in report.errors)


def test_duplicates_across_splits_are_reported(folder: Path, write_jsonl) -> None:
    write_jsonl("data/imdb/test.jsonl", [{"text": "  ROW   3 ", "label": 0}, *rows(5, 3000)])
    write_jsonl("data/imdb/validation.jsonl", [{"text": "row 3", "label": 0}, *rows(5, 3003)])
    report = find_duplicates(open_corpus("imdb", data_dir=folder))
    assert report.counts == {("validation", "test"): 3, ("train", "test"): 1, ("train", "validation"): 1}
    assert "row 3" in str(report)


def test_more_than_one_percent_of_shared_rows_is_an_error(folder: Path, write_jsonl) -> None:
    def check(shared: int):
        write_jsonl("data/imdb/test.jsonl", [*rows(shared), *rows(200 - shared, 2000)])
        return check_corpus(open_corpus("imdb", data_dir=folder))

    assert check(2).ok
    assert "2 rows of train also appear in test" in str(check(2))
    assert check(3).errors == [
        "1.5 % of the rows of test also appear in train (at most 1 % is allowed), so scores on test are not "
        "those of unseen rows: remove these rows from train"
    ]
    write_jsonl("data/imdb/train.jsonl", [*rows(40), *rows(1) * 50])
    assert check(1).ok  # one row of test, although it is 51 times in train


def test_equal_texts_are_held_out_together() -> None:
    assert text_key("A  b\n") == text_key("a B")
    assert text_key("ab", "c") != text_key("a", "bc")
    holdout = Holdout(validation=0.5, first_rows=10)
    assert holdout.split_of({"text": "Some Text"}, 0) == holdout.split_of({"text": "some  text"}, 9)
    assert {holdout.split_of({"text": str(i)}, 10) for i in range(50)} == {"train"}
