"""`Arm`: one side of a comparison, which is all runs of one experiment at one scale, one run per seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oelm.analysis.load import DIVERGED, FINISHED, LoadedRun, RunResult
from oelm.config.run_config import ArmKey, RunConfig
from oelm.data.synthetic.tasks import RECALL_TASKS
from oelm.methods.method import Method

Planned = Mapping[str, Mapping[str, RunConfig]]  # experiment ID -> scale -> config in the catalogue

# `Arm.architecture` recognises the architecture of a transformers model by these parts of its name.
_ENCODER_DECODERS = ("t5", "bart")
_ENCODERS = ("bert", "minilm", "electra", "albert", "deberta")
_DECODERS = ("gpt", "opt", "llama", "qwen", "neox")


@dataclass(frozen=True, eq=False)
class Arm:
    """One side of a comparison: all runs of one experiment at one scale, one run per seed."""

    runs: tuple[LoadedRun, ...]
    planned: Mapping[str, RunConfig]  # scale -> config in the catalogue; {} if the experiment is not in it

    @cached_property
    def first(self) -> LoadedRun:
        """The first finished run, or the first run if none has finished; it has the settings of the arm."""
        return (self.finished or self.runs)[0]

    @property
    def config(self) -> RunConfig:
        return self.first.config

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def name(self) -> str:
        return self.first.arm

    @property
    def method(self) -> Method:
        return self.config.method

    @property
    def key(self) -> ArmKey:
        return self.config.arm_key

    @property
    def place(self) -> tuple[str, str, str]:
        """The study, the scale and the `compare.group` (such as "GPT/tinystories") of the config."""
        return self.config.study, self.config.scale, self.config.compare.group

    @property
    def group(self) -> str:
        """The `compare.group` of the config for display; the dataset is added if it is not in the name."""
        dataset = self.config.data.dataset
        group = self.config.compare.group or f"{self.config.study}/{dataset}"
        names_dataset = dataset in group or group.rpartition("/")[2] in dataset
        return group if names_dataset else f"{group}, {dataset}"

    @cached_property
    def finished(self) -> tuple[LoadedRun, ...]:
        """The finished runs with a test score, sorted by seed."""
        done = [r for r in self.runs if r.state == FINISHED and r.result and r.result.test is not None]
        return tuple(sorted(done, key=lambda r: r.seed))

    @property
    def diverged(self) -> tuple[LoadedRun, ...]:
        return tuple(r for r in self.runs if r.state == DIVERGED)

    @property
    def results(self) -> list[RunResult]:
        """The results of the finished runs, sorted by seed."""
        return [r.result for r in self.finished if r.result]

    @property
    def metric(self) -> str:
        """The metric of the test scores, "ppl" or "accuracy"; "" before a run has finished."""
        return self.results[0].metric if self.finished else ""

    @property
    def scores(self) -> dict[int, float]:
        """Seed -> test perplexity, or test accuracy between 0 and 1."""
        return {r.seed: r.result.test for r in self.finished if r.result and r.result.test is not None}

    @property
    def mean(self) -> float:
        """The mean test score over seeds.

        For perplexity it is the geometric mean, because comparisons use ratios of perplexity.
        """
        return self._mean_of(list(self.scores.values()))

    @property
    def validation(self) -> float | None:
        """The mean validation score over seeds; None if a finished run has no validation score."""
        values = [r.validation for r in self.results]
        known = [v for v in values if v is not None]
        return self._mean_of(known) if known and len(known) == len(values) else None

    def _mean_of(self, values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(values))) if self.metric == "ppl" else np.mean(values))

    @property
    def ended(self) -> dict[int, str]:
        """Seed -> "finished" or "diverged", for the runs that have a test score or diverged."""
        return {r.seed: r.state for r in (*self.finished, *self.diverged)}

    @property
    def max_seeds(self) -> int:
        """The option --max-seeds of the `oelm decide` that ran this arm; 0 if another command ran it."""
        return max(r.config.compare.max_seeds for r in self.runs)

    def with_seeds(self, seeds: Collection[int]) -> Arm:
        """Return the arm with only the runs of these seeds."""
        return replace(self, runs=tuple(r for r in self.runs if r.seed in seeds))

    @property
    def is_frozen_language_model(self) -> bool:
        """Whether the model is a language model (scored by perplexity) and its method freezes parameters."""
        return self.method.freeze != "none" and self.config.task != "classification"

    @property
    def freezes(self) -> bool:
        """Whether a finished run of this arm has frozen parameters."""
        return any(r.parameters.frozen > 0 for r in self.results)

    @property
    def probes(self) -> bool:
        """Whether the dataset is a generated recall task instead of a corpus or a labelled dataset."""
        return self.config.data.dataset in RECALL_TASKS

    @property
    def test_rows(self) -> str:
        """The hash of the test data, from manifest.json; "" if no run has finished or recorded the hash."""
        return self.finished[0].manifest.data.fingerprints.get("test", "") if self.finished else ""

    @property
    def dataset_name(self) -> str:
        """The dataset of the experiment at full scale (runs at a smaller scale may use another dataset)."""
        return self.planned.get("full", self.config).data.dataset

    @property
    def task(self) -> str:
        return "classification" if self.config.task == "classification" else "generation"

    @property
    def architecture(self) -> str:
        """The kind of architecture: "encoder", "decoder", "encoder-decoder" or "other"."""
        model = self.config.model
        if model.family == "gpt":
            return "decoder" if model.causal else "encoder"
        name = Path(model.name).name.lower()  # without the folders around a model, such as /opt
        if any(part in name for part in _ENCODER_DECODERS) and "bert" not in name:
            return "encoder-decoder"
        if any(part in name for part in _ENCODERS):
            return "encoder"
        return "decoder" if any(part in name for part in _DECODERS) else "other"


def gather_arms(runs: Iterable[LoadedRun], planned: Planned) -> tuple[Arm, ...]:
    """Group runs into arms (one per study, scale and experiment) and sort the arms for display."""
    groups: dict[ArmKey, list[LoadedRun]] = {}
    for run in runs:
        groups.setdefault(run.config.arm_key, []).append(run)
    arms = (
        Arm(tuple(sorted(group, key=lambda r: r.seed)), planned.get(id, {}))
        for (_, _, id), group in groups.items()
    )
    return tuple(sorted(arms, key=_display_order))


def _display_order(arm: Arm) -> tuple[Any, ...]:
    """Return the sort key of an arm.

    Language models come before classifiers, and a baseline before the arms that are compared with it.
    """
    config, compare = arm.config, arm.config.compare
    classifies = config.task == "classification"
    return config.study, config.scale, classifies, compare.group, bool(compare.baseline), arm.id
