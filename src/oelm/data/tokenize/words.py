"""Tokenize fast by caching the token ids of words.

A byte-level BPE first splits text into words with a regular expression and never merges tokens of two words;
BERT's WordPiece never merges across white space. So a text is split with Python's `re`, and the ids of each
word are looked up in a dict. A word that is not in the dict is encoded by the Hugging Face tokenizer, so the
ids are the same as without a cache.

The regular expression for BPE is the ASCII part of that of GPT-2. If a word contains other characters,
everything up to the next white space is encoded by the Hugging Face tokenizer, because only that tokenizer
knows which Unicode characters are letters. For WordPiece, text is split only at the four characters that its
normalizer always treats as white space.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

# The white space of GPT-2's regular expression (Unicode White_Space); Python's \s has four more characters.
_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NEXT_IS_ASCII = "(?![^\\x00-\\x7f])"
_BYTE_LEVEL_WORD = re.compile(
    "'(?:[stmd]|re|ve|ll)"
    f"| ?+[A-Za-z]++{_NEXT_IS_ASCII}"
    f"| ?+[0-9]++{_NEXT_IS_ASCII}"
    f"| ?+[!-/:-@\\[-`{{-~\\x00-\\x08\\x0e-\\x1f\\x7f]++{_NEXT_IS_ASCII}"
    f"| ?[^{_SPACE}]+"  # a word with non-ASCII characters: up to the next white space
    f"|[{_SPACE}]+(?![^{_SPACE}])"
    f"|[{_SPACE}]+"
)
_WORD_PIECE_WORD = re.compile("[^ \\t\\n\\r]+")
_MAX_WORDS = 300_000  # at most this many words are cached, about 60 MB
_MAX_WORD_LENGTH = 48  # longer words are not cached, because they rarely occur twice


class WordCache(dict[str, bytes]):
    """A dict {word: token ids as the bytes of an array}; looking up a missing word encodes and adds it."""

    def __init__(self, pattern: re.Pattern[str], encode: Callable[[str], list[int]], dtype: np.dtype) -> None:
        super().__init__()
        self._find = pattern.findall
        self._encode = encode
        self._dtype = dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._encode(word), dtype=self._dtype).tobytes()
        if len(word) <= _MAX_WORD_LENGTH and len(self) < _MAX_WORDS:
            self[word] = ids
        return ids

    def encode(self, text: str) -> bytes:
        """Return the token ids of `text`, as the raw bytes of an array of integers."""
        return b"".join(map(self.__getitem__, self._find(text)))


def word_pattern(facts: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern that splits text into the words of a tokenizer; None for unsupported tokenizers.

    `facts` is the content of tokenizer.json.
    """
    model, before = facts["model"].get("type"), facts.get("pre_tokenizer") or {}
    normalizer, added = facts.get("normalizer") or {}, facts.get("added_tokens") or []
    if model == "BPE" and before.get("type") == "ByteLevel":
        standard = not before.get("add_prefix_space") and before.get("use_regex", True)
        # With added tokens, the cache cannot be used: such a token can span several words.
        return _BYTE_LEVEL_WORD if standard and not normalizer and not added else None
    bert = (normalizer.get("type"), before.get("type")) == ("BertNormalizer", "BertPreTokenizer")
    if model == "WordPiece" and bert:
        single_words = all(
            not token["lstrip"] and not token["rstrip"] and " " not in token["content"] for token in added
        )
        return _WORD_PIECE_WORD if single_words and normalizer.get("clean_text") else None
    return None
