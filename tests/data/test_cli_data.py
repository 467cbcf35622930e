import json
from pathlib import Path

import pytest

from oelm.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["data", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_list_names_every_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(
        name in out for name in ("tinystories", "2,119,719", "stories-pairs", "mismatched", "3-way pairs")
    )
    code, out, _ = run(capsys, "list", "--json")
    facts = {entry["name"]: entry for entry in json.loads(out)}
    assert facts["sst2"]["hub"] == "nyu-mll/glue"
    assert facts["stories"]["found_in"] == "built in"


def test_prepare_encodes_text_and_labelled_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "prepare", "stories", "--rows", 50, "--tokenizer", "bpe-300")
    assert code == 0
    assert "tokens of 50 documents" in out
    words = ("prepare", "stories", "imdb", "--source", "builtin", "--rows", 50, "--tokenizer", "bpe-300")
    code, out, _ = run(capsys, *words, "--json")
    stories, facts = json.loads(out)
    assert code == 0
    assert stories["splits"]["train"]["documents"] == 50
    assert "standing in for imdb" in facts["origin"]
    assert facts["splits"]["train"]["rows"] == 50
    assert len(facts["splits"]["train"]["fingerprint"]) == 64
    assert facts["splits"]["train"]["padding_share"] < facts["splits"]["train"]["padding_share_to_max"]


def test_bad_rows_are_errors_unless_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, write_jsonl
) -> None:
    for split in ("train", "validation", "test"):
        good = [{"text": f"{split} row {i}", "label": i % 2} for i in range(200)]
        write_jsonl(f"mine/{split}.jsonl", [*good, "{broken"])
    words = ("prepare", tmp_path / "mine", "--tokenizer", "bpe-300")
    code, _, err = run(capsys, *words)
    assert code == 1
    assert "row 201" in err
    assert "--skip-bad-rows" in err
    assert "Traceback" not in err
    code, out, _ = run(capsys, *words, "--skip-bad-rows")
    assert code == 0
    assert "1 bad rows skipped" in out
    code, out, _ = run(capsys, "check", tmp_path / "mine")
    assert code == 1
    assert "invalid JSON" in out
    assert run(capsys, "check", tmp_path / "mine", "--skip-bad-rows", "--json")[0] == 0


def test_a_misspelled_name_exits_with_two_and_suggests_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(capsys, "prepare", "tinystorys")
    assert code == 2
    assert "did you mean 'tinystories'" in err
    assert run(capsys, "prepare", "imdb", "--source", "moon")[0] == 2


def test_without_network_and_folder_the_error_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "prepare", "agnews")
    assert code == 1
    assert "OELM_DATA_DIR" in err


def test_prepare_and_check_report_texts_that_appear_in_two_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for split, texts in {
        "train": ("one", "Two  ", "three"),
        "validation": ("four",),
        "test": ("two", "five"),
    }.items():
        lines = [json.dumps({"text": f"{text} sheep in a field"}) for text in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    words = (folder, "--tokenizer", "bpe-300", "--cache-dir", tmp_path / "cache")
    code, out, _ = run(capsys, "prepare", *words)
    assert code == 0
    assert "1 rows of train also appear in test, e.g. 'Two   sheep in a field'" in out
    code, out, _ = run(capsys, "prepare", *words, "--json")
    assert json.loads(out)["duplicates"] == {
        "validation in test": 0,
        "train in test": 1,
        "train in validation": 0,
    }
    code, out, _ = run(capsys, "prepare", *words, "--no-duplicates")
    assert "appear in" not in out
    code, out, _ = run(capsys, "check", folder)
    assert code == 1
    assert "ERROR: 50.0 % of the rows of test also appear in train" in out
    code, out, _ = run(capsys, "check", folder, "--no-duplicates")
    assert code == 0


def test_a_dataset_can_come_from_a_catalogue_file_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.csv").write_text(
            f"body,priority\n{split} fire,urgent\n{split} tea,normal\n", encoding="utf-8"
        )
    files = {split: str(tmp_path / f"{split}.csv") for split in ("train", "validation", "test")}
    own = tmp_path / "own.py"
    own.write_text(
        "from oelm.data.catalogue import Dataset, register_dataset\n"
        "register_dataset(Dataset(name='tickets-of-mine', about='mine', label_names=('normal', 'urgent'),\n"
        f"    aliases={{'text': ('body',), 'label': ('priority',)}}, files={files!r}))\n"
    )
    code, out, _ = run(capsys, "check", "tickets-of-mine", "--catalogue", own)
    assert code == 0
    assert "train               2 rows" in out
    assert "tickets-of-mine" in run(capsys, "list", "--catalogue", own)[1]
