"""Before arms are compared: what differs between them besides the method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oelm.config.diff import config_diff
from oelm.config.run_config import RunConfig
from oelm.experiments.catalogue import experiments
from oelm.experiments.experiment import Experiment

# What an arm is called, and its seed, may differ; the method is the question itself.
_ALLOWED = ("id", "seed", "compare.", "method.")


@dataclass(frozen=True)
class Difference:
    """One field in which an arm and the arm it is measured against are not equal."""

    arm: str
    against: str
    field: str
    values: tuple[Any, Any]  # (of the arm, of the other)
    why: str = ""

    def __str__(self) -> str:
        mine, other = self.values
        text = f"{self.arm} has {self.field} {_shown(mine)}, {self.against} has {_shown(other)}"
        return f"{text}: {self.why}" if self.why else text


def differences(arm: RunConfig, other: RunConfig) -> list[Difference]:
    """Everything but the method that could explain a result. Rates chosen from one grid count as equal."""
    found = []
    for name, (mine, theirs) in config_diff(arm, other).items():
        if name.startswith(_ALLOWED):
            continue
        if name == "optim.lr" and _tuned_alike(arm, other):
            continue
        why = "unequal tuning" if name.startswith("tune.") or name == "optim.lr" else ""
        found.append(Difference(arm.id, other.id, name, (mine, theirs), why))
    return found


def check_arms(configs: Sequence[RunConfig], published: Iterable[str] = ()) -> list[Difference]:
    """Each arm against its baseline and its control, wherever both are among `configs` at the same scale."""
    as_published = set(published)
    place = {(c.study, c.id, c.scale): c for c in configs}
    found: list[Difference] = []
    for config in place.values():
        for partner in dict.fromkeys((config.compare.baseline, config.compare.control)):
            other = place.get((config.study, partner, config.scale))
            if other is None:
                continue
            for d in differences(config, other):
                why = "as the study published it" if config.id in as_published else d.why
                found.append(Difference(d.arm, d.against, d.field, d.values, why))
    return found


def against_baseline(e: Experiment, settle: Callable[[Experiment], RunConfig]) -> list[str]:
    """The same for one experiment of the catalogue, as lines. `settle`: what each would run with."""
    known = experiments()
    partners = [known[name] for name in dict.fromkeys((e.baseline, e.control)) if name in known]
    configs = [settle(arm) for arm in (e, *partners)]
    published = [arm.id for arm in (e, *partners) if arm.published]
    return [str(d) for d in check_arms(configs, published) if d.arm == e.id]


def _tuned_alike(arm: RunConfig, other: RunConfig) -> bool:
    return bool(arm.tune.grid) and arm.tune == other.tune


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
