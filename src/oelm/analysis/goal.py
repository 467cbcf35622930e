"""Is anything lost? One claim about a frozen language model, decided on all of its intervals together.

It asks for more than the study's 5 %: at most 1 % above the same architecture with trained Q/K, and below
every trained network that a user might take instead. Reached only if each interval lies where it should;
missed if one of them lies wholly elsewhere; otherwise, or if a comparison is refused or not made yet,
undecided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oelm.analysis.compare import TRAINED_INIT, Arm, Comparison, Comparisons, Kind
from oelm.analysis.verdict import BETTER, MET, MISSED, PPL_GOAL, UNDECIDED, WORSE, Verdict, decide

REFERENCES: tuple[Kind, ...] = ("control", "init", "baseline", "plain")


@dataclass(frozen=True, eq=False)
class Goal:
    arm: Arm
    against: dict[Kind, Comparison]
    missing: tuple[Kind, ...]  # comparisons that the claim needs and that cannot be made yet

    @property
    def outcome(self) -> str:
        found = [_holds(c) for c in self.against.values()]
        if MISSED in found:
            return MISSED
        return UNDECIDED if self.missing or UNDECIDED in found else MET

    @property
    def verdict(self) -> Verdict:
        return Verdict("goal", self.outcome)


def goals(comparisons: Comparisons) -> list[Goal]:
    """Of every frozen language model that has a control of its own."""
    found: dict[tuple[str, str, str], dict[Kind, Comparison]] = {}
    for c in comparisons.made:
        if c.arm.freezes and c.metric == "ppl" and c.kind in REFERENCES:
            found.setdefault(c.arm.key, {})[c.kind] = c
    made = []
    for against in found.values():
        if "control" in against:
            arm = against["control"].arm
            missing = tuple(kind for kind in _due(arm, comparisons.arms) if kind not in against)
            made.append(Goal(arm, {k: against[k] for k in REFERENCES if k in against}, missing))
    return made


def _due(arm: Arm, arms: Iterable[Arm]) -> list[Kind]:
    """What the claim needs by the arm's own config. Where control and start are one network, that is once."""
    due: list[Kind] = ["control", "baseline"]
    if arm.method.control != TRAINED_INIT:
        due.append("init")
    baselines = [a for a in arms if a.place == arm.place and a.id == arm.config.compare.baseline]
    if any(a.config.compare.baseline for a in baselines):
        due.append("plain")
    return due


def _holds(c: Comparison) -> str:
    if c.ratio is None or c.caveats:
        return UNDECIDED
    if c.kind == "control":
        diverged = "diverged" if c.arm.diverged or c.reference.diverged else ""
        outcome = decide(PPL_GOAL, c.ratio, withhold=diverged).outcome
    else:
        outcome = {BETTER: MET, WORSE: MISSED}.get(c.sign.outcome, UNDECIDED)
    return outcome if outcome in (MET, MISSED) else UNDECIDED
