"""Options of `oelm decide`."""

from __future__ import annotations

from typing import Any

import pytest

from oelm.cli import decide
from oelm.cli.main import main
from oelm.errors import UsageError


@pytest.mark.parametrize(
    ("words", "seeds"),
    [([], (1000, 1001)), (["--trial-seeds", "0", "1"], (0, 1)), (["--trial-seeds", "5-6"], (5, 6))],
)
def test_trial_seeds_are_those_that_the_user_gives(
    monkeypatch: pytest.MonkeyPatch, words: list[str], seeds: tuple[int, ...]
) -> None:
    given: dict[str, Any] = {}

    def request(**options: Any) -> None:
        given.update(options)
        raise UsageError("only the options are of interest")

    monkeypatch.setattr(decide, "Request", request)
    assert main(["decide", "GPT-02", "--scale", "smoke", "--gpus", "none", *words]) == 2
    assert given["trial_seeds"] == seeds
