"""Arms that differ in nothing but their method, with their baseline and trained controls named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oelm.experiments.experiment import Experiment
from oelm.methods.method import Method
from oelm.methods.presets import find_method

Arm = tuple[str, str | Method, str]  # its name, its method, what it answers


def comparison(
    make: Callable[..., Experiment],
    dataset: str,
    arms: Sequence[Arm],
    *,
    stem: str,
    suffix: str = "",
    baseline_of_first: str = "",
    **settings: object,
) -> list[Experiment]:
    """One experiment per arm, all tuned on the same grid. The first arm is the others' baseline; the control
    of an arm is the one whose method its own method names as such.

    make: what gives the settings of the kind (`paper.language_model`, ...) for a dataset
    stem, suffix: the ID is <stem>-<arm><suffix>
    baseline_of_first: ID of what the first arm itself is measured against
    """
    named = {find_method(method).name: arm for arm, method, _ in arms}

    def id_of(arm: str) -> str:
        return f"{stem}-{arm}{suffix}"

    made = []
    for arm, method, title in arms:
        control = named.get(find_method(method).control, "")
        fields = {
            "id": id_of(arm),
            "title": title,
            "method": method,
            "arm": f"{arm}{suffix}".lower(),
            "baseline": baseline_of_first if arm == arms[0][0] else id_of(arms[0][0]),
            "control": id_of(control) if control else "",
            "tuned": True,
            **settings,
        }
        made.append(make(dataset, **fields))
    return made
