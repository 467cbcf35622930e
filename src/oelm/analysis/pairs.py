"""Find the pairs of arms to compare. The kind of a comparison says which reference the arm is compared with.

baseline        the baseline named in the arm's config: shows the total cost or gain of the method
control         the same architecture and init with trained Q/K: shows the cost of freezing alone
orthogonality   the same model with frozen Gaussian Q/K rows: shows what orthonormal rows gain or lose
bias            the trained baseline with the same biases on q and k, for arms that have such biases
init            the same model with orthonormal init and trained Q/K, without the other parts of the method
plain           the baseline of the arm's baseline, which is a simpler architecture
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oelm.analysis.arms import Arm
from oelm.methods.method import Method
from oelm.methods.presets import find_method

# The fields of a method that its control shares.
_SAME_IN_CONTROL = ("conv", "conv_value", "bias", "bias_scale", "core", "temperature", "relative_bias")
Kind = Literal["baseline", "control", "orthogonality", "bias", "init", "plain"]
TRAINED_INIT = "orthogonal-init"  # the method with orthonormal init and trained Q/K
TRAINED_BIAS = "baseline-bias"  # the baseline with biases on q and k


@dataclass(frozen=True)
class Pair:
    """An arm and its reference; `reference` is None if the reference has no runs at the arm's scale."""

    kind: Kind
    arm: Arm
    reference_id: str
    reference: Arm | None


def find_pairs(arms: Sequence[Arm]) -> list[Pair]:
    """Return all pairs of arms to compare according to their configs, even if they have no finished runs."""
    return [*_named_in_configs(arms), *_orthogonality_pairs(arms), *_no_loss_pairs(arms)]


def find_arm(arms: Sequence[Arm], arm: Arm, id: str) -> Arm | None:
    """Return the arm of the experiment `id` at the scale of `arm`; None if there is none.

    If several studies have such an arm, the one in the study of `arm` is returned.
    """
    found = [a for a in arms if a.id == id and a.config.scale == arm.config.scale]
    same_study = [a for a in found if a.config.study == arm.config.study]
    return next(iter([*same_study, *found]), None)


def _named_in_configs(arms: Sequence[Arm]) -> Iterator[Pair]:
    for arm in arms:
        named = arm.config.compare
        if named.baseline not in ("", arm.id):
            reference = find_arm(arms, arm, named.baseline)
            # A study without a plain baseline, such as `longer`, names the control of an arm as its baseline.
            plain = reference is None or reference.method.name == "baseline"
            kind: Kind = "baseline" if plain or named.baseline != named.control else "control"
            yield Pair(kind, arm, named.baseline, reference)
        if named.control not in ("", arm.id, named.baseline):
            yield Pair("control", arm, named.control, find_arm(arms, arm, named.control))


def _orthogonality_pairs(arms: Sequence[Arm]) -> Iterator[Pair]:
    for arm in arms:
        if arm.method.init == "headwise" and not arm.method.trains_qk:
            for other in arms:
                if _same_place_and_model(arm, other) and _only_rows_differ(arm.method, other.method):
                    yield Pair("orthogonality", arm, other.id, other)


def _no_loss_pairs(arms: Sequence[Arm]) -> Iterator[Pair]:
    """Yield the pairs of kind "bias", "init" and "plain" of frozen language models, for `goal.py`."""
    for arm in arms:
        if not arm.is_frozen_language_model or not arm.config.compare.control:
            continue
        references: dict[Kind, str] = {"bias": TRAINED_BIAS} if arm.method.bias else {}
        if arm.method.control != TRAINED_INIT:
            references["init"] = TRAINED_INIT
        for kind, name in references.items():
            for other in arms:
                if _same_place_and_model(arm, other) and other.method == find_method(name):
                    yield Pair(kind, arm, other.id, other)
        baseline = find_arm(arms, arm, arm.config.compare.baseline)
        plain = find_arm(arms, arm, baseline.config.compare.baseline) if baseline else None
        if plain is not None:
            yield Pair("plain", arm, plain.id, plain)


def other_than_freezing(arm: Arm, control: Arm) -> tuple[str, ...]:
    """Return how the method of an arm's control differs from the arm's, apart from freezing, as texts.

    A control may lack the low-rank adapters of the arm (see `Method.control`). Its init may differ, because
    some methods have a control with another one; then the gain may differ, too.
    """
    fields = list(_SAME_IN_CONTROL)
    if arm.method.init == control.method.init:
        fields.append("gain")
    values = [(name, getattr(arm.method, name), getattr(control.method, name)) for name in fields]
    found = [f"{name} {theirs} ≠ {mine}" for name, mine, theirs in values if mine != theirs]
    return (*found, *([] if control.method.trains_qk else [f"freeze {control.method.freeze} ≠ none"]))


def _same_place_and_model(arm: Arm, other: Arm) -> bool:
    return other.place == arm.place and other.config.model == arm.config.model


def _only_rows_differ(orthogonal: Method, gaussian: Method) -> bool:
    """Return whether the methods differ only in their Q/K rows: orthonormal, or Gaussian with the same norm.

    With gain "match" (a field of `Method`), the rows of every Gaussian init are rescaled to the norm of
    orthonormal rows. With another gain, only the init "normal-matched", N(0, 1/d), has this norm.
    """
    inits = ("normal", "normal-matched") if orthogonal.gain == "match" else ("normal-matched",)
    return gaussian.init in inits and replace(gaussian, init="headwise", name=orthogonal.name) == orthogonal
