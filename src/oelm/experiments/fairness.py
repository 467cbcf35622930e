"""Check before a comparison: which settings other than the method differ between arms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from oelm.config.diff import config_diff
from oelm.config.run_config import RunConfig
from oelm.experiments.catalogue import experiments
from oelm.experiments.experiment import Experiment

# Fields that may differ: what identifies the arm, and the method, which is the question of the comparison.
_ALLOWED = ("id", "seed", "compare.", "method.")


@dataclass(frozen=True)
class UnequalSetting:
    """A config field in which an arm differs from its baseline or control."""

    arm: str
    other: str
    field: str
    values: tuple[Any, Any]  # (of the arm, of the other)
    why: str = ""

    def __str__(self) -> str:
        value, other = (f"{v:g}" if isinstance(v, float) else str(v) for v in self.values)
        text = f"{self.arm} has {self.field} {value}, {self.other} has {other}"
        return f"{text}: {self.why}" if self.why else text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_settings(arm: RunConfig, other: RunConfig) -> list[UnequalSetting]:
    """Differing fields that could explain a result besides the method.

    Learning rates that were chosen from the same grid count as equal.
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
    """Compare each arm with its baseline and its control, if they are among `configs` at the same scale.

    published: IDs that run with the original study's own settings, equal or not
    """
    as_published = set(published)
    arms = {(c.study, c.id, c.scale): c for c in configs}
    found: list[UnequalSetting] = []
    for config in arms.values():
        for partner in dict.fromkeys((config.compare.baseline, config.compare.control)):
            other = arms.get((config.study, partner, config.scale))
            if other is None:
                continue
            unequal = compare_settings(config, other)
            if config.id in as_published:
                unequal = [replace(setting, why="as the original study published it") for setting in unequal]
            found += unequal
    return found


def check_experiment(e: Experiment, config_of: Callable[[Experiment], RunConfig]) -> list[UnequalSetting]:
    """Compare one catalogued experiment with its baseline and control; `config_of` makes the configs."""
    known = experiments()
    partners = [known[name] for name in dict.fromkeys((e.baseline, e.control)) if name in known]
    configs = [config_of(arm) for arm in (e, *partners)]
    published = [arm.id for arm in (e, *partners) if arm.published]
    return [setting for setting in check_arms(configs, published) if setting.arm == e.id]
