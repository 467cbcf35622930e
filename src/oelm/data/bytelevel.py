"""Byte-level BPE at the speed of a dictionary.

A byte-level BPE never merges across the words its pattern cuts the text into, and words repeat. So most of
the work is looking words up: one pass of Python's `re`, one dictionary look-up a word. Words not seen
before go to the real tokenizer, which alone decides their ids.

The pattern is GPT-2's, written for ASCII. A run of text with any other character is handed over whole:
which Unicode characters count as letters is then the tokenizer's own affair and cannot differ here. Runs
are cut only where GPT-2's pattern always cuts: before white space, or after a piece followed by ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

# Unicode's White_Space, as the tokenizer's pattern means it; Python's own \s has four characters more.
_SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
_NEXT_IS_ASCII = "(?![^\\x00-\\x7f])"
_WORD = re.compile(
    "'(?:[stmd]|re|ve|ll)"
    f"| ?+[A-Za-z]++{_NEXT_IS_ASCII}"
    f"| ?+[0-9]++{_NEXT_IS_ASCII}"
    f"| ?+[!-/:-@\\[-`{{-~\\x00-\\x08\\x0e-\\x1f\\x7f]++{_NEXT_IS_ASCII}"
    f"| ?[^{_SPACE}]+"  # something beyond ASCII: to the end of the run
    f"|[{_SPACE}]+(?![^{_SPACE}])"
    f"|[{_SPACE}]+"
)
_MOST_WORDS = 300_000  # about 60 MB
_LONGEST_WORD = 48  # longer ones hardly repeat


class WordCache(dict[str, bytes]):
    """Words -> the bytes of their ids."""

    def __init__(self, encode: Callable[[str], list[int]], dtype: np.dtype) -> None:
        super().__init__()
        self._encode = encode
        self._dtype = dtype

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._encode(word), dtype=self._dtype).tobytes()
        if len(word) <= _LONGEST_WORD and len(self) < _MOST_WORDS:
            self[word] = ids
        return ids

    def encode(self, text: str) -> bytes:
        """The ids of the text, as bytes of the dtype."""
        return b"".join(map(self.__getitem__, _WORD.findall(text)))
