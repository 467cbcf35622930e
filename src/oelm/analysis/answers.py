"""Answer the questions of a study file: an arm, a reference, a rule and a margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oelm.analysis import guards
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison, compare
from oelm.analysis.load import LoadedRun
from oelm.analysis.pairs import find_arm
from oelm.analysis.statistics import LEVEL
from oelm.analysis.verdict import MET, MISSED, REFUSED, Rule, Verdict, decide
from oelm.config.run_config import QuestionConfig


@dataclass(frozen=True, eq=False)
class Answer:
    """A question about an arm, and its answer, which is None before both arms have finished runs."""

    arm: Arm
    question: QuestionConfig
    comparison: Comparison | None
    verdict: Verdict | None


def answers(arms: Sequence[Arm], trials: Sequence[LoadedRun] = (), level: float = LEVEL) -> list[Answer]:
    """Return the answer to each question that the configs of the arms ask, in the order of the arms."""
    return [_answer(arm, q, arms, trials, level) for arm in arms for q in arm.config.compare.questions]


def _answer(
    arm: Arm, question: QuestionConfig, arms: Sequence[Arm], trials: Sequence[LoadedRun], level: float
) -> Answer:
    reference = find_arm(arms, arm, question.reference)
    if reference is None or not (arm.finished and reference.finished):
        return Answer(arm, question, None, None)
    c = compare("baseline", arm, reference, trials, level=level)
    if c.ratio is None:
        return Answer(arm, question, c, Verdict(question.rule, REFUSED))
    withhold = "caveat" if c.caveats else guards.undecidable(arm, reference)
    verdict = decide(question_rule(question, perplexity=c.metric == "ppl"), c.ratio, withhold=withhold)
    return Answer(arm, question, c, verdict)


def question_rule(question: QuestionConfig, *, perplexity: bool) -> Rule:
    """Return the rule of a question for the log ratio of perplexity or of accuracy.

    >>> question_rule(QuestionConfig("BASE", "non-inferior", 0.05), perplexity=False).regions
    ('missed', 'met')
    """
    better = -1 if perplexity else 1  # the sign of a log ratio that is better
    worst, best = (math.log1p(sign * better * question.margin) for sign in (-1, 1))
    if question.rule == "equivalent":
        low, high = sorted((worst, best))
        return Rule(question.rule, (low, high), (MISSED, MET, MISSED))
    margin = worst if question.rule == "non-inferior" else best
    return Rule(question.rule, (margin,), (MET, MISSED) if perplexity else (MISSED, MET))
