"""Tiny runs on built-in data: a fraction of a second each once torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oelm.config.hash import config_hash
from oelm.config.run_config import BudgetConfig, DataConfig, Machine, ModelConfig, OptimConfig, RunConfig
from oelm.methods.presets import find_method

SHAPES: dict[str, tuple[str, str, str, str]] = {  # name -> task, dataset, family, model
    "lm": ("lm", "stories", "gpt", "smoke"),
    "gpt-cls": ("classification", "stories-2way", "gpt", "smoke"),
    "bert": ("classification", "stories-pairs", "hf", "tiny-bert"),
    "t5": ("denoising", "stories", "hf", "tiny-t5"),
    "bart": ("denoising", "stories", "hf", "tiny-bart"),
    "t5-cls": ("classification", "stories-2way", "hf", "tiny-t5"),
    "bart-cls": ("classification", "stories-2way", "hf", "tiny-bart"),
}


def smoke_config(shape: str = "lm", name: str = "oelm-freeze", **sections: dict[str, Any]) -> RunConfig:
    """A run of a dozen steps; `sections` change fields: smoke_config("lm", budget={"steps": 4})."""
    task, dataset, family, model = SHAPES[shape]
    eval_rows = 6 if task == "classification" else 1  # one story has a dozen windows of 16 tokens
    config = RunConfig(
        id="SMOKE",
        study="tests",
        task=task,  # type: ignore[arg-type]
        data=DataConfig(
            dataset, source="builtin", tokenizer="bpe-300", max_length=16, train_rows=40, eval_rows=eval_rows
        ),
        model=ModelConfig(family=family, name=model, causal=shape != "gpt-cls"),  # type: ignore[arg-type]
        method=find_method(name),
        optim=OptimConfig(lr=3e-3, warmup_steps=3),
        budget=BudgetConfig(batch_size=4, steps=12, eval_every=4, log_every=3),
        scale="smoke",
    )
    for section, fields in sections.items():
        config = replace(config, **{section: replace(getattr(config, section), **fields)})
    return config


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(device="cpu", threads=1, cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def make() -> Callable[..., RunConfig]:
    return smoke_config


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Callable[[RunConfig], Path]:
    """Return the folder of an uninterrupted run, trained once per session; copy it before changing it."""
    from oelm.training.fit import fit

    root = tmp_path_factory.mktemp("reference")

    def train(config: RunConfig) -> Path:
        folder = root / config_hash(config)[:16]
        if not folder.exists():
            assert fit(config, folder, machine).state == "finished"
        return folder

    return train
