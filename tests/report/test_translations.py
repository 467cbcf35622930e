"""Translations: complete, with the same fields, compiled, and really Chinese."""

from __future__ import annotations

import gettext
import re
import string
import sys
from pathlib import Path

import pytest

from oelm.analysis.messages import Message
from oelm.errors import UsageError
from oelm.report.translate import LOCALE, Translator

babel = pytest.importorskip("babel")
sys.path.append(str(Path(__file__).parents[2] / "tools"))

from translations import CHINESE, english  # noqa: E402


@pytest.fixture(scope="module")
def chinese() -> dict[str, str]:
    """English text -> Chinese text of the .po file."""
    from babel.messages.pofile import read_po

    with CHINESE.open("rb") as file:
        return {m.id: m.string for m in read_po(file) if m.id}


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_every_marked_sentence_has_a_translation_with_the_same_fields(chinese):
    marked = english()
    assert len(marked) > 150  # extraction still finds them
    assert set(chinese) == set(marked), "run `make translations`"
    for text, translation in chinese.items():
        assert translation, f"translate in {CHINESE.name}: {text}"
        assert fields(translation) == fields(text), text


def test_the_compiled_file_is_current(chinese):
    with CHINESE.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)
    assert {text: compiled.gettext(text) for text in chinese} == chinese, "run `make translations`"


def test_the_chinese_text_is_chinese_with_full_width_punctuation(chinese):
    """Latin letters alone only where the text is made of fields, and punctuation is full-width."""
    latin = {text for text, zh in chinese.items() if not re.search(r"[\u4e00-\u9fff]", zh)}
    assert all(re.fullmatch(r"(\{\w+\}|[\s,:;()n=])+", text) for text in latin)
    for text in chinese.values():
        prose = re.sub(r"\{\w+\}|`[^`]*`|N\(0, 0\.02\)", "", text)
        assert not re.search(r"[,;:?!()]", prose), text
        assert "残差" not in text


def test_messages_are_translated_when_they_are_shown():
    runs = (Message("{id} seed {seed}", id="A", seed=1), Message("{id} seed {seed}", id="{B}", seed=2))
    message = Message("frozen parameters changed (the freeze audit failed): {runs}", runs=runs)
    english = "frozen parameters changed (the freeze audit failed): A seed 1, {B} seed 2"
    assert str(message) == Translator("en")(message) == english
    assert Translator("zh")(message) == "冻结参数发生了变化（冻结审计未通过）：A 种子 1、{B} 种子 2"
    assert message == Message("frozen parameters changed (the freeze audit failed): {runs}", runs=runs)


def test_an_unknown_language_is_an_error():
    with pytest.raises(UsageError, match="unknown language 'de'"):
        Translator("de")
    assert LOCALE.is_dir()
