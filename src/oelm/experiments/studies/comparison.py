"""Build the experiments of a comparison, whose arms differ only in their method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from oelm.experiments.experiment import Experiment
from oelm.methods.method import Method
from oelm.methods.presets import find_method


class ArmSpec(NamedTuple):
    """One arm (a method in a comparison); `oelm list` shows the `title`."""

    name: str
    method: str | Method
    title: str


def arms_of(methods: Iterable[str | Method], note: str = "") -> list[ArmSpec]:
    """Return an arm for each method: its name, and as title its `purpose` followed by `note`."""
    found = [(find_method(method), method) for method in methods]
    return [ArmSpec(m.name, method, m.purpose + note) for m, method in found]


def comparison(
    make: Callable[..., Experiment],
    dataset: str,
    arms: Sequence[ArmSpec],
    *,
    stem: str,
    suffix: str = "",
    baseline_of_first: str = "",
    **settings: Any,
) -> list[Experiment]:
    """Return one experiment per arm, with the ID <stem>-<arm><suffix>.

    By default, the learning rate of every arm is tuned on the same grid.

    The first arm is the baseline of the others. If `Method.control` of an arm's method is the method of
    another arm, that arm is its control.

    make: function that builds an experiment from a dataset and fields of `Experiment`, such as
        `paper.language_model`
    baseline_of_first: ID of the experiment that the first arm is compared with; "" = none
    settings: further fields of `Experiment`, the same for all arms
    """
    ids = {arm.name: f"{stem}-{arm.name}{suffix}" for arm in arms}
    by_method = {find_method(arm.method).name: ids[arm.name] for arm in arms}
    first = arms[0].name
    return [
        make(
            dataset,
            **{
                "id": ids[arm.name],
                "title": arm.title,
                "method": arm.method,
                "arm": f"{arm.name}{suffix}".lower(),
                "baseline": baseline_of_first if arm.name == first else ids[first],
                "control": by_method.get(find_method(arm.method).control, ""),
                "tuned": True,
                **settings,
            },
        )
        for arm in arms
    ]


def with_rotary_arms(
    make: Callable[..., Experiment],
    dataset: str,
    arms: Sequence[ArmSpec],
    rotary_arms: Sequence[ArmSpec],
    *,
    rotary_model: Any,
    **settings: Any,
) -> list[Experiment]:
    """Return the experiments of `arms` (learned position embeddings) and `rotary_arms` (rotary ones).

    The baseline of the first rotary arm is the first arm with learned position embeddings.

    rotary_model: the model of the rotary arms
    settings: further arguments of `comparison()`, for both sets of arms
    """
    learned = comparison(make, dataset, arms, **settings)
    rotary = {"suffix": "-rope", "baseline_of_first": learned[0].id, "model": rotary_model}
    return [*learned, *comparison(make, dataset, rotary_arms, **rotary, **settings)]
