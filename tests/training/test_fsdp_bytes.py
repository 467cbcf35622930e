"""Frozen tensors have no gradient shards and no optimizer state under FSDP2: the bytes that a page shows."""

from __future__ import annotations

import contextlib
import os
import runpy
from pathlib import Path

import pytest
from forked_ranks import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_shows_the_bytes_that_the_example_prints(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "fsdp_bytes.py"))

    def work(rank: int) -> int:
        with (tmp_path / str(rank)).open("w") as file, contextlib.redirect_stdout(file):
            example["rank_main"](rank, int(os.environ["MASTER_PORT"]))
        return 0

    assert run_ranks(work) == [0, 0]
    printed = (tmp_path / "0").read_text()
    assert f"```text\n{printed}```" in (ROOT / "docs" / "howto" / "own-loop.md").read_text(encoding="utf-8")
