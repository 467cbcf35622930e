"""Compare arms: measure their difference, apply the rules for verdicts, and collect notes for the reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from oelm.analysis.arms import Arm, Planned, gather_arms
from oelm.analysis.fairness import guards
from oelm.analysis.fairness.flags import result_flags, run_flags
from oelm.analysis.load import PENDING, Loaded, LoadedRun
from oelm.analysis.messages import Message
from oelm.analysis.pairs import Kind, Pair, find_pairs, other_than_freezing
from oelm.analysis.questions import GIVEN_UP, Question, answer_pair, rules_of
from oelm.analysis.statistics.effects import TestError, measure
from oelm.analysis.statistics.intervals import LEVEL, Estimate
from oelm.analysis.statistics.lr_choice import lr_choice_sd
from oelm.analysis.statistics.sequential import level_per_look
from oelm.analysis.verdict import (
    ACCURACY_SIGN,
    ACCURACY_TARGET,
    MAX_PLANNED_SEEDS,
    PPL_GOAL,
    PPL_SIGN,
    PPL_TARGET,
    REFUSED,
    SCENARIO,
    UNDECIDED,
    Rule,
    SeedsNeeded,
    Verdict,
    decide,
)


@dataclass(frozen=True, eq=False)
class Comparison:
    """One arm compared with one reference arm, for example with its baseline."""

    kind: Kind
    arm: Arm
    reference: Arm
    effect: Estimate | None  # log ratio of perplexity, or points of accuracy; None if `refused` is not empty
    ratio: Estimate | None  # log ratio of perplexity or accuracy; None if `refused` is not empty
    target: Verdict  # whether the arm is at most 5 % worse than the reference
    sign: Verdict  # whether the arm is better than, worse than or equivalent to the reference
    scenario: Verdict | None  # A, B or C by the rule `SCENARIO`; only for frozen GPT classifiers
    refused: tuple[Message, ...]  # why the arms must not be compared
    caveats: tuple[Message, ...]  # why the difference is shown but gets no verdict
    flags: tuple[Message, ...]  # what else a reader must know about the comparison
    test_error: TestError = "none"
    max_seeds: int = 0  # option --max-seeds of `oelm decide`; 0 if the number of seeds was fixed
    # Standard deviation of `effect` that comes from choosing the learning rates by a few tuning trials, which
    # the interval does not contain; None if it is not known.
    lr_choice_sd: float | None = None
    goal: Verdict | None = None  # the rule `PPL_GOAL`; only for the kinds "control" and "bias" of perplexity

    @property
    def metric(self) -> str:
        return self.arm.metric

    @property
    def group(self) -> str:
        return self.arm.group

    @property
    def dataset(self) -> str:
        return self.arm.config.data.dataset

    @property
    def runs(self) -> tuple[LoadedRun, ...]:
        return (*self.arm.finished, *self.reference.finished)


@dataclass(frozen=True)
class Comparisons:
    """All comparisons of an analysis, and messages about those that still wait for finished runs."""

    made: tuple[Comparison, ...]
    arms: tuple[Arm, ...]
    waiting: tuple[Message, ...]  # comparisons that a config asks for but that lack finished runs

    def of(self, kind: Kind) -> list[Comparison]:
        return [c for c in self.made if c.kind == kind]


def compare_all(loaded: Loaded, planned: Planned) -> Comparisons:
    """Return all comparisons of which both arms have finished runs, and messages about the others."""
    arms = gather_arms(loaded.runs, planned)
    names = guards.datasets_by_test_rows(arms)
    made: list[Comparison] = []
    waiting: list[Message] = []
    for pair in find_pairs(arms):
        arm, reference = pair.arm, pair.reference
        if arm.finished and reference is not None and reference.finished:
            same_rows = guards.other_names(arm, names)
            if max_seeds := max(arm.max_seeds, reference.max_seeds):
                found = compare_sequentially(pair, loaded.trials, same_rows, max_seeds)
                made += found
                if not found and pair.kind in ("baseline", "control"):
                    waiting.append(_first_seed_missing(arm, reference))
            else:
                made.append(compare(pair.kind, arm, reference, loaded.trials, same_rows))
        elif pair.kind in ("baseline", "control"):  # configs name only references of these kinds
            waiting.append(
                Message(
                    "{id} against {reference} ({scale}): waiting for finished runs of {missing}",
                    id=arm.id,
                    reference=pair.reference_id,
                    missing=pair.reference_id if arm.finished else arm.id,
                    scale=arm.config.scale,
                )
            )
    return Comparisons(tuple(made), arms, tuple(waiting))


def compare(
    kind: Kind,
    arm: Arm,
    reference: Arm,
    trials: Sequence[LoadedRun] = (),
    same_rows: Sequence[str] = (),
    max_seeds: int = 0,
) -> Comparison:
    """Compare an arm with a reference arm; both must have finished runs.

    trials: the tuning trials of the runs folder
    same_rows: names of other datasets in this analysis that have the same test rows
    max_seeds: option --max-seeds of `oelm decide`; 0 if the number of seeds was fixed
    """
    flags = run_flags(arm, reference, trials)
    if kind == "control":
        flags = (*_control_flags(arm, reference), *flags)
    refused = guards.refusals(arm, reference)
    if refused:
        target, sign = Verdict("target", REFUSED), Verdict("sign", REFUSED)
        return Comparison(
            kind, arm, reference, None, None, target, sign, None, refused, (), flags, max_seeds=max_seeds
        )
    measured = measure(arm, reference, level_per_look(max_seeds) if max_seeds else LEVEL)
    caveats = guards.caveats(arm, reference, same_rows)
    reason = "caveat" if caveats else guards.undecidable(arm, reference)
    perplexity = arm.metric == "ppl"

    def verdict(rule: Rule, estimate: Estimate) -> Verdict:
        return decide(rule, estimate, withhold=reason, max_seeds=max_seeds or MAX_PLANNED_SEEDS)

    scenario = None
    if not perplexity and arm.config.model.family == "gpt" and kind == "baseline" and arm.freezes:
        scenario = verdict(SCENARIO, measured.effect)
    return Comparison(
        kind,
        arm,
        reference,
        measured.effect,
        measured.ratio,
        verdict(PPL_TARGET if perplexity else ACCURACY_TARGET, measured.ratio),
        verdict(PPL_SIGN if perplexity else ACCURACY_SIGN, measured.ratio),
        scenario,
        (),
        caveats,
        (*flags, *result_flags(measured, reference)),
        measured.test_error,
        max_seeds,
        lr_choice_sd(arm, reference, trials),
        verdict(PPL_GOAL, measured.ratio) if perplexity and kind in ("control", "bias") else None,
    )


def _control_flags(arm: Arm, control: Arm) -> list[Message]:
    """Return a flag if the named control is not the network of the arm with trained Q/K."""
    fields = other_than_freezing(arm, control)
    if not fields:
        return []
    return [
        Message(
            "{reference} is not the same network with trained Q/K ({fields}), so the change is not the "
            "effect of freezing alone",
            reference=control.id,
            fields=fields,
        )
    ]


def compare_sequentially(
    pair: Pair, trials: Sequence[LoadedRun], same_rows: Sequence[str], max_seeds: int
) -> list[Comparison]:
    """Return a list with the comparison of two arms for which `oelm decide` chose the number of seeds.

    `oelm decide` looks at the results after every seed. Seeds after the look that closed the last question
    are not used, and the intervals allow for repeated looks (`level_per_look()`). The list is empty if the
    first seed has not ended in both arms.

    same_rows: as in `compare()`
    """
    questions, sides = looks_of(pair, rules_of(pair.kind, pair.arm), max_seeds)
    if sides is None:
        return []
    made = compare(pair.kind, *sides, trials, same_rows, max_seeds)
    if any(q.is_open for q in questions):
        used = [r.seed for side in sides for r in side.runs]
        made = replace(made, flags=(*made.flags, *_seed_missing(pair, used)))
    if made.caveats:  # they withhold the verdict, also that of a question that is closed
        return [made]
    stopped = {q.rule.name: verdict for q in questions if (verdict := stopped_verdict(q))}
    scenario = made.scenario and stopped.get("scenario", made.scenario)
    target, sign = stopped.get("target", made.target), stopped.get("sign", made.sign)
    goal = made.goal and stopped.get("goal", made.goal)
    return [replace(made, target=target, sign=sign, scenario=scenario, goal=goal)]


def looks_of(
    pair: Pair, rules: Iterable[Rule], max_seeds: int
) -> tuple[list[Question], tuple[Arm, Arm] | None]:
    """Return the questions about a pair of arms, and the two arms with only the seeds that answer them.

    The second result is None if the first seed has not ended in both arms. If one of the arms has no finished
    run among these seeds, because they diverged, the arms have all their seeds.
    """
    assert pair.reference is not None
    seeds = _started_seeds(pair.arm, pair.reference)
    questions = answer_pair(pair, rules, seeds, max_seeds)
    used = seeds[: max(q.n for q in questions)]
    if not used:
        return questions, None
    arm, reference = pair.arm.with_seeds(used), pair.reference.with_seeds(used)
    all_diverged = not arm.finished or not reference.finished
    return questions, (pair.arm, pair.reference) if all_diverged else (arm, reference)


def _started_seeds(arm: Arm, reference: Arm) -> list[int]:
    """Return the seeds of both arms in ascending order; runs that never started do not count."""
    return sorted({r.seed for r in (*arm.runs, *reference.runs) if r.state != PENDING})


def _seed_missing(pair: Pair, used: Iterable[int]) -> list[Message]:
    """Return a flag if seeds that have ended in both arms are not used, because a smaller one is missing."""
    assert pair.reference is not None
    last = max(used)
    later = [s for s in _started_seeds(pair.arm, pair.reference) if s > last]
    waiting = tuple(str(s) for s in later if s in pair.arm.ended and s in pair.reference.ended)
    if not waiting or str(later[0]) in waiting:
        return []
    return [
        Message(
            "seed {seed} has not ended in both arms, so the later ones are not used yet ({seeds}): `oelm "
            "decide` compares the seeds in order",
            seed=later[0],
            seeds=waiting,
        )
    ]


def _first_seed_missing(arm: Arm, reference: Arm) -> Message:
    first = _started_seeds(arm, reference)[0]
    return Message(
        "{id} against {reference} ({scale}): waiting for seed {seed}, which has not ended in both arms; "
        "`oelm decide` compares the seeds in order",
        id=arm.id,
        reference=reference.id,
        scale=arm.config.scale,
        seed=first,
    )


def stopped_verdict(question: Question) -> Verdict | None:
    """Return the verdict of a question that was decided or given up; None in any other state."""
    name, regions, n = question.rule.name, question.rule.regions, question.n
    if question.decided:
        return Verdict(name, question.state, (question.state,), stopped=n)
    if question.state == GIVEN_UP:
        return Verdict(name, UNDECIDED, regions, SeedsNeeded(None, "given up"), stopped=n)
    return None
