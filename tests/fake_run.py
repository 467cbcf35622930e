"""Run folders of finished runs without training, for tests of everything that reads them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from oelm.config.run_config import DataConfig, ModelConfig, RunConfig
from oelm.methods.presets import find_method
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Fairness, ParameterCounts, Results, Scores, Status


def small_config(**changes: Any) -> RunConfig:
    """A language model on built-in stories, with the default of every other setting."""
    data, model = DataConfig(dataset="stories"), ModelConfig(name="smoke")
    config = RunConfig("GPT-01", "paper", "lm", data, model, find_method("baseline"))
    return replace(config, **changes)


def fake_results(config: RunConfig, loss: float = 1.0, **changes: Any) -> Results:
    """Valid results of a language model with this loss; a tuning trial has no test scores."""
    scores = Scores(loss, n=100, ppl=math.exp(loss))
    results = Results.of(
        config,
        metric="ppl",
        test=None if config.tune.trial else scores,
        validation=replace(scores, step=1),
        parameters=ParameterCounts(100, 90, 10, 20, 10),
        steps=1,
        tokens_seen=100,
        checkpoint_bytes=1000,
        stopped_early=False,
        fairness=Fairness(),
    )
    return replace(results, **changes)


def write_finished_run(path: Path, config: RunConfig, loss: float = 1.0) -> RunFolder:
    """Write config.yaml, status.json, results.json and checksums.json of a finished run."""
    folder = RunFolder(path)
    folder.claim(config)
    folder.write(fake_results(config, loss))
    folder.write_checksums()
    folder.write_status(Status(state="finished", step=1, total_steps=1))
    folder.close()
    return folder
