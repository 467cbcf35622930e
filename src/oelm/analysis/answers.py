"""Answer the questions of study files. A question has an arm, a reference arm, a rule and a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison, compare, looks_of, stopped_verdict
from oelm.analysis.fairness import guards
from oelm.analysis.load import LoadedRun
from oelm.analysis.pairs import Pair, find_arm
from oelm.analysis.verdict import MAX_PLANNED_SEEDS, REFUSED, Verdict, decide, question_rule
from oelm.config.run_config import QuestionConfig


@dataclass(frozen=True, eq=False)
class Answer:
    """A question about an arm, and its answer.

    `comparison` and `verdict` are None while an arm of the question has no finished runs, or while the arms
    share too few seeds for the first look of a sequential study.
    """

    arm: Arm
    question: QuestionConfig
    comparison: Comparison | None
    verdict: Verdict | None


def answers(arms: Sequence[Arm], trials: Sequence[LoadedRun] = ()) -> list[Answer]:
    """Return the answers to the questions in the configs of the arms, in the order of the arms.

    trials: the tuning trials of the runs folder
    """
    names = guards.datasets_by_test_rows(arms)
    return [
        _answer(arm, q, find_arm(arms, arm, q.reference), trials, guards.other_names(arm, names))
        for arm in arms
        for q in arm.config.compare.questions
    ]


def _answer(
    arm: Arm,
    question: QuestionConfig,
    reference: Arm | None,
    trials: Sequence[LoadedRun],
    same_rows: Sequence[str],
) -> Answer:
    if reference is None or not (arm.finished and reference.finished):
        return Answer(arm, question, None, None)
    changed = guards.different_questions(arm)
    rule, stopped = question_rule(question, perplexity=arm.metric == "ppl"), None
    max_seeds = max(arm.max_seeds, reference.max_seeds)
    if max_seeds:
        (looked,), sides = looks_of(Pair("baseline", arm, reference.id, reference), [rule], max_seeds)
        if sides is None:
            return Answer(arm, question, None, None)
        (arm, reference), stopped = sides, stopped_verdict(looked)
    c = compare("baseline", arm, reference, trials, same_rows, max_seeds)
    if changed:
        c = replace(c, effect=None, ratio=None, refused=(*changed, *c.refused))
    if c.ratio is None:
        return Answer(arm, question, c, Verdict(question.rule, REFUSED))
    withhold = "caveat" if c.caveats else guards.undecidable(arm, reference)
    if stopped is None or c.caveats:
        stopped = decide(rule, c.ratio, withhold=withhold, max_seeds=max_seeds or MAX_PLANNED_SEEDS)
    return Answer(arm, question, c, stopped)
