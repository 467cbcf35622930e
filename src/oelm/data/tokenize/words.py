"""Tokenising at the speed of a dictionary.

A byte-level BPE never merges across the words its pattern cuts the text into, BERT's WordPiece never across
white space, and words repeat. So most of the work is looking words up: one pass of Python's `re`, one
dictionary look-up a word. Words not seen before go to the real tokenizer, which alone decides their ids.

For the BPE the pattern is GPT-2's, written for ASCII. A run of text with any other character is handed over
whole: which Unicode characters count as letters is then the tokenizer's own affair and cannot differ here.
Runs are cut only where GPT-2's pattern always cuts: before white space, or after a piece followed by ASCII.
For WordPiece only the four characters count that its normalizer surely takes for a space.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

# Unicode's White_Space, as the tokenizer's pattern means it; Python's own \s has four characters more.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NEXT_IS_ASCII = "(?![^\\x00-\\x7f])"
_BYTE_LEVEL_WORD = re.compile(
    "'(?:[stmd]|re|ve|ll)"
    f"| ?+[A-Za-z]++{_NEXT_IS_ASCII}"
    f"| ?+[0-9]++{_NEXT_IS_ASCII}"
    f"| ?+[!-/:-@\\[-`{{-~\\x00-\\x08\\x0e-\\x1f\\x7f]++{_NEXT_IS_ASCII}"
    f"| ?[^{_SPACE}]+"  # something beyond ASCII: to the end of the run
    f"|[{_SPACE}]+(?![^{_SPACE}])"
    f"|[{_SPACE}]+"
)
_WORD_PIECE_WORD = re.compile("[^ \\t\\n\\r]+")
_MOST_WORDS = 300_000  # about 60 MB
_LONGEST_WORD = 48  # longer ones hardly repeat


class WordCache(dict[str, bytes]):
    """Words -> the bytes of their ids."""

    def __init__(self, pattern: re.Pattern[str], encode: Callable[[str], list[int]], dtype: np.dtype) -> None:
        super().__init__()
        self._find = pattern.findall
        self._encode = encode
        self._dtype = dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._encode(word), dtype=self._dtype).tobytes()
        if len(word) <= _LONGEST_WORD and len(self) < _MOST_WORDS:
            self[word] = ids
        return ids

    def encode(self, text: str) -> bytes:
        """The ids of the text, as bytes of the dtype."""
        return b"".join(map(self.__getitem__, self._find(text)))


def word_pattern(facts: dict[str, Any]) -> re.Pattern[str] | None:
    """The words of a tokenizer (its tokenizer.json as a dict), if it is of a kind whose words are known."""
    model, before = facts["model"].get("type"), facts.get("pre_tokenizer") or {}
    normalizer, added = facts.get("normalizer") or {}, facts.get("added_tokens") or []
    if model == "BPE" and before.get("type") == "ByteLevel":
        usual = not before.get("add_prefix_space") and before.get("use_regex", True)
        # A token that is matched before the words are could span several of them.
        return _BYTE_LEVEL_WORD if usual and not normalizer and not added else None
    bert = (normalizer.get("type"), before.get("type")) == ("BertNormalizer", "BertPreTokenizer")
    if model == "WordPiece" and bert:
        within = all(
            not token["lstrip"] and not token["rstrip"] and " " not in token["content"] for token in added
        )
        return _WORD_PIECE_WORD if within and normalizer.get("clean_text") else None
    return None
