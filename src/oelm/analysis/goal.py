"""Decide from several comparisons whether freezing the Q/K of a language model loses nothing.

This goal is stricter than the 5 % target. The perplexity of the frozen model must be at most 1 % above the
perplexity of two trained models: the same architecture with trained Q/K (the control), and the baseline plus
the biases that the method adds. It must be lower than the perplexity of every other trained model that a user
could choose instead. The goal is met if every confidence interval shows this, missed if one interval shows
the opposite, and otherwise undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison, Comparisons
from oelm.analysis.pairs import TRAINED_INIT, Kind, find_arm
from oelm.analysis.verdict import BETTER, MET, MISSED, UNDECIDED, WORSE, Verdict
from oelm.config.run_config import ArmKey

REFERENCES: tuple[Kind, ...] = ("control", "bias", "init", "baseline", "plain")


@dataclass(frozen=True, eq=False)
class Goal:
    """Whether one frozen language model loses nothing, with the comparisons that decide this."""

    arm: Arm
    against: dict[Kind, Comparison]
    missing: tuple[Kind, ...]  # kinds of comparison that the goal needs but that lack finished runs

    @property
    def outcome(self) -> str:
        found = [_outcome(c) for c in self.against.values()]
        if MISSED in found:
            return MISSED
        return UNDECIDED if self.missing or UNDECIDED in found else MET

    @property
    def verdict(self) -> Verdict:
        return Verdict("goal", self.outcome)


def goals(comparisons: Comparisons) -> list[Goal]:
    """Return one `Goal` for every frozen language model that was compared with its control."""
    by_arm: dict[ArmKey, dict[Kind, Comparison]] = {}
    for c in comparisons.made:
        if c.arm.freezes and c.metric == "ppl" and c.kind in REFERENCES:
            by_arm.setdefault(c.arm.key, {})[c.kind] = c
    found = []
    for against in by_arm.values():
        if "control" in against:
            arm = against["control"].arm
            missing = tuple(kind for kind in _required(arm, comparisons.arms) if kind not in against)
            found.append(Goal(arm, {k: against[k] for k in REFERENCES if k in against}, missing))
    return found


def _required(arm: Arm, arms: Sequence[Arm]) -> list[Kind]:
    """Return the kinds of comparison that the goal of this arm needs."""
    required: list[Kind] = ["control", "baseline"]
    if arm.method.bias:
        required.append("bias")
    if arm.method.control != TRAINED_INIT:  # else the control itself is the reference of kind "init"
        required.append("init")
    baseline = find_arm(arms, arm, arm.config.compare.baseline)
    if baseline is not None and baseline.config.compare.baseline:
        required.append("plain")
    return required


def _outcome(c: Comparison) -> str:
    """Return "met", "missed" or "undecided": does one comparison show what the goal requires of it?"""
    if c.ratio is None or c.caveats:
        return UNDECIDED
    if c.kind in ("control", "bias"):
        outcome = c.goal.outcome if c.goal else UNDECIDED
    else:
        outcome = {BETTER: MET, WORSE: MISSED}.get(c.sign.outcome, UNDECIDED)
    return outcome if outcome in (MET, MISSED) else UNDECIDED
