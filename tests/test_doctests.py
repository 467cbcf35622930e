"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of(name: str) -> None:
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name])  # a package may hide its module behind a function
    assert result.attempted > 0
    assert result.failed == 0
