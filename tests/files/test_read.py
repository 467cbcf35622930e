"""A file that anyone may have written ends in one error that names it, never in a traceback or a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from oelm.errors import OelmError
from oelm.files import read as safe_files
from oelm.files.read import parse_json, read_json, read_json_lines, read_text
from oelm.files.yaml import parse_yaml

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain_values)
def test_json_is_read_as_json_does(value: object) -> None:
    assert parse_json(json.dumps(value), "x") == value


@given(plain_values)
def test_yaml_is_read_as_yaml_does(value: object) -> None:
    text = yaml.safe_dump(value)
    assert parse_yaml(text, "x") == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    ["0300", "1_000", "12:30", "0x1F", "0b11", "1:30.5", "yes", "no", "on", "off", "2026-01-02", "1e5"],
)
def test_only_decimal_numbers_and_true_and_false_are_not_text(text: str) -> None:
    assert parse_yaml(f"{text}: {text}", "x") == {text: text}
    assert parse_yaml("[7, -7, 0, 0.5, .5, 1.0e-05, .inf, true, null, ~]", "x") == [
        *(7, -7, 0, 0.5, 0.5, 1e-5, float("inf"), True, None, None)
    ]
    assert parse_yaml(yaml.safe_dump([text]), "x") == [text]


@given(st.text(alphabet='[]{}":,\\ \n-?&*!|>abu0d81.eE+x', max_size=60))
def test_any_text_is_a_value_or_one_error(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        message = ""
        try:
            parse(text, "the file")
        except OelmError as error:
            message = str(error)
        assert not message or "the file" in message


JSON_PROBLEMS = {
    "deep lists": ("[" * 100_000, "nested deeper"),
    "deep objects": ('{"a":' * 3_000 + "1" + "}" * 3_000, "nested deeper"),
    "deep after text with brackets": ('["]]]]]\\"]]]", ' + "[" * 60 + "]" * 61, "nested deeper"),
    "duplicate key": ('{"seed": 1, "seed": 2}', "'seed' appears twice"),
    "NaN": ('{"loss": NaN}', "NaN"),
    "Infinity": ('{"loss": -Infinity}', "Infinity"),
    "too large a float": ('{"loss": 1e999}', "1e999"),
    "too large an integer": ('{"steps": ' + "9" * 400 + "}", "too large a number"),
    "too many digits": ("1" * 5_000, "not JSON"),
    "half a character": ('{"reason": "\\ud800"}', "lone UTF-16 surrogate"),
    "not UTF-8": (b'{"id": "\xff"}', "not UTF-8"),
    "empty": ("", "not JSON"),
}

YAML_PROBLEMS = {
    "100,000 brackets": ("[" * 100_000, "nested deeper"),
    "3,000 levels": ("{a: " * 3_000 + "}" * 3_000, "nested deeper"),
    "3,000 dashes": ("- " * 3_000 + "a", "nested deeper"),
    "deep indentation": ("\n".join(" " * i + "a:" for i in range(300)), "nested deeper"),
    "aliases that double": ("a: &a [x]\nb: &b [*a, *a]\n", "alias"),
    "a list in itself": ("&a [*a]", "alias"),
    "duplicate key": ("seed: 1\nseed: 2\n", "'seed' appears twice"),
    "a Python object": ("!!python/object/apply:os.system [ls]", "not valid YAML"),
    "not a number": ("a: !!int x", "not valid YAML"),
    "half a character": ('a: "\\ud800"', "the file|lone UTF-16 surrogate"),
    "too large": ("a: " + "x" * 300_000, "larger than 256 KiB"),
    "a control character": ("a: \x07", "not valid YAML"),
}


@pytest.mark.parametrize("limit", [10, 100_000])
def test_a_file_is_read_up_to_its_limit_and_not_beyond(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * limit)
    assert len(read_text(path, max_bytes=limit)) == limit
    path.write_bytes(b"x" * (limit + 1))
    with pytest.raises(OelmError, match="larger than"):
        read_text(path, max_bytes=limit)


def test_too_large_an_integer_is_found_at_any_place() -> None:
    for before in range(31):
        with pytest.raises(OelmError, match="too large a number"):
            parse_json(" " * before + "9" * 301, "x")
        assert parse_json(" " * before + "9" * 299, "x") == 10**299 - 1


@pytest.mark.parametrize("case", JSON_PROBLEMS)
def test_json_problems_are_one_error_that_names_the_file(case: str, tmp_path: Path) -> None:
    content, expected = JSON_PROBLEMS[case]
    path = tmp_path / "status.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(OelmError, match=expected) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("case", YAML_PROBLEMS)
def test_yaml_problems_are_one_error_that_names_the_file(case: str, tmp_path: Path) -> None:
    content, expected = YAML_PROBLEMS[case]
    path = tmp_path / "the file"
    path.write_text(content)
    with pytest.raises(OelmError, match=expected) as caught:
        parse_yaml(read_text(path, max_bytes=10**6), str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_brackets_in_texts_are_not_depth() -> None:
    texts = ["[[{{" * 50, '\\"[' * 80]
    assert parse_json(json.dumps(texts), "x") == texts


def test_a_pipe_or_an_oversized_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OelmError, match="not a regular file"):
        read_text(tmp_path / "pipe", max_bytes=10)
    (tmp_path / "large").write_text("x" * 11)
    with pytest.raises(OelmError, match="larger than"):
        read_text(tmp_path / "large", max_bytes=10)
    (tmp_path / "zeros").symlink_to("/dev/zero")
    with pytest.raises(OelmError, match="not a regular file"):
        read_text(tmp_path / "zeros", max_bytes=10)


def test_many_small_containers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_files, "MAX_CONTAINERS", 1_000)
    with pytest.raises(OelmError, match="more than 1,000 lists and objects"):
        parse_json("[" + "[]," * 1_000 + "0]", "index")


def test_rows_are_read_up_to_the_one_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_files, "ROW_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step"')
    assert [row["step"] for row in read_json_lines(path)] == [1, 2]
    for wrong, expected in (("[1]\n", "JSON object"), ("x" * 200 + "\n", "longer"), ("nope\n", "not JSON")):
        path.write_text('{"step": 1}\n' + wrong)
        with pytest.raises(OelmError, match=f"line 2.*{expected}"):
            list(read_json_lines(path))
