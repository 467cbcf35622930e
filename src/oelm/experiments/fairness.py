"""Find the settings, other than the method, in which the arms (methods) of a comparison differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from oelm.config.diff import config_diff
from oelm.config.run_config import RunConfig
from oelm.experiments.catalogue import experiments
from oelm.experiments.experiment import Experiment

# Config fields (or prefixes of them) that may differ between arms: they identify a run, or are the method.
_ALLOWED = ("id", "seed", "compare.", "method.")


@dataclass(frozen=True)
class UnequalSetting:
    """A config field in which an arm (a method in a comparison) differs from its baseline or control."""

    arm: str  # experiment ID
    other: str  # experiment ID of the baseline or control
    field: str
    values: tuple[Any, Any]  # (value in the arm, value in the baseline or control)
    why: str = ""  # why the values differ, if this is known

    def __str__(self) -> str:
        value, other = (f"{v:g}" if isinstance(v, float) else str(v) for v in self.values)
        text = f"{self.arm} has {self.field} {value}, {self.other} has {other}"
        return f"{text}: {self.why}" if self.why else text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_settings(arm: RunConfig, other: RunConfig) -> list[UnequalSetting]:
    """Return the config fields other than the method in which two arms differ.

    Any of them, instead of the method, could be the cause of a difference in results. Two learning rates that
    were tuned on the same grid count as equal.
    """
    tuned_alike = bool(arm.tune.grid) and arm.tune == other.tune
    found = []
    for name, values in config_diff(arm, other).items():
        if name.startswith(_ALLOWED) or (name == "optim.lr" and tuned_alike):
            continue
        why = "unequal tuning" if name.startswith("tune.") or name == "optim.lr" else ""
        found.append(UnequalSetting(arm.id, other.id, name, values, why))
    return found


def check_arms(configs: Sequence[RunConfig], published: Iterable[str] = ()) -> list[UnequalSetting]:
    """Return the settings in which arms differ from their baseline or control at the same scale.

    An arm is not compared with a baseline or control that is not among `configs`.

    published: IDs of experiments with the settings of the original study; their `why` says so
    """
    as_published = set(published)
    arms = {config.arm_key: config for config in configs}
    found: list[UnequalSetting] = []
    for config in arms.values():
        for partner in dict.fromkeys((config.compare.baseline, config.compare.control)):
            other = arms.get((config.study, config.scale, partner))
            if other is None:
                continue
            unequal = compare_settings(config, other)
            if config.id in as_published:
                unequal = [replace(setting, why="as the original study published it") for setting in unequal]
            found += unequal
    return found


def check_experiment(e: Experiment, config_of: Callable[[Experiment], RunConfig]) -> list[UnequalSetting]:
    """Return the settings in which an experiment differs from its baseline or control in the catalogue.

    config_of: returns the config of an experiment
    """
    known = experiments()
    partners = [known[name] for name in dict.fromkeys((e.baseline, e.control)) if name in known]
    configs = [config_of(arm) for arm in (e, *partners)]
    published = [arm.id for arm in (e, *partners) if arm.published]
    return [setting for setting in check_arms(configs, published) if setting.arm == e.id]
