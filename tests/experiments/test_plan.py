"""What a run needs, computed before it starts."""

from __future__ import annotations

from typing import Any

import pytest

from oelm.config.overrides import override
from oelm.experiments.catalogue import experiment
from oelm.experiments.plan import count_parameters, planned_steps


@pytest.mark.parametrize(
    ("id", "changes", "steps"),
    [
        ("SST-2-02", {"budget.epochs": 3}, 3 * 8),  # 64 rows in batches of 8
        ("SST-2-02", {"budget.epochs": 3, "budget.steps": 5}, 5),
        ("SST-2-02", {"budget.epochs": 1, "budget.steps": 100_000}, 8),
        ("GPT-01", {"budget.steps": 7}, 7),
        ("GPT-01", {"budget.steps": 0, "budget.epochs": 1}, None),  # the tokens are not counted yet
    ],
)
def test_the_shorter_of_steps_and_epochs_is_planned(
    id: str, changes: dict[str, Any], steps: int | None
) -> None:
    assert planned_steps(override(experiment(id).at("smoke", 0), changes)) == steps


def test_parameters_that_train_later_count_as_trainable() -> None:
    counts, _, _ = count_parameters(experiment("TS-GRADUAL").at("smoke", 0))
    assert counts is not None
    assert counts["trainable"] == counts["total"]
