"""The questions of a study, and their answers from the seeds that have run so far.

A question asks for the verdict of one rule (the 5 % target, a scenario, the 1 % goal, or the sign) about one
pair of arms. `oelm decide` looks at the results after 3, 4, 5, ... paired seeds, with the wider intervals of
`sequential.py`. It closes a question at the first look that decides it or shows that more seeds will probably
not decide it.

The answer to a question depends only on the runs of its two arms, taken in the order of their seeds. So it
does not depend on which runs ended first, on runs of other arms, or on the machine that computes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oelm.analysis.arms import Arm
from oelm.analysis.fairness import guards
from oelm.analysis.load import DIVERGED
from oelm.analysis.pairs import Kind, Pair, find_arm, find_pairs
from oelm.analysis.statistics.effects import Effects, measure
from oelm.analysis.statistics.futility import GIVE_UP, chance_of_verdict, seeds_expected
from oelm.analysis.statistics.intervals import Estimate
from oelm.analysis.statistics.sequential import MIN_SEEDS, level_per_look
from oelm.analysis.verdict import (
    ACCURACY_SIGN,
    ACCURACY_TARGET,
    EQUIVALENT,
    PPL_GOAL,
    PPL_SIGN,
    PPL_TARGET,
    SCENARIO,
    UNDECIDED,
    Rule,
    decide,
    question_rule,
)
from oelm.errors import UsageError

RULES = ("target", "scenario", "goal", "sign")
QuestionKey = tuple[Any, ...]
GIVEN_UP, NO_VERDICT = "given up", "no verdict"


@dataclass(frozen=True, eq=False)
class Question:
    """A question (which verdict does this rule give about this pair of arms?) and its present answer."""

    kind: Kind
    arm: Arm
    reference: Arm
    rule: Rule
    # A region of the rule ("met", "worse", "A", ...), "equivalent", "undecided" (more seeds follow),
    # "given up" (more seeds would probably not decide it), or "no verdict" (`why` says why there is none).
    state: str = UNDECIDED
    n: int = 0  # number of paired seeds that were used; does not grow after the question is closed
    estimate: Estimate | None = None  # difference after n seeds; its interval is widened for repeated looks
    chance: float = 0.0  # predicted probability of a verdict with the maximum number of seeds
    expected: int | None = None  # number of seeds that makes a verdict more likely than not; None = unknown
    why: str = ""  # why the question was given up or gets no verdict

    @property
    def key(self) -> QuestionKey:
        return (*self.arm.key, self.reference.id, self.kind, self.rule.name, *self.rule.margins)

    @property
    def comparison(self) -> str:
        """Return what the reference is to the arm, such as "control"; "-" if it is only another arm."""
        named = self.arm.config.compare
        if not named.questions:
            return self.kind
        return {named.control: "control", named.baseline: "baseline"}.get(self.reference.id, "-")

    @property
    def decided(self) -> bool:
        return self.state in (*self.rule.regions, EQUIVALENT)

    @property
    def is_open(self) -> bool:
        return self.state == UNDECIDED

    @property
    def metric(self) -> str:
        return "accuracy" if self.arm.config.task == "classification" else "ppl"

    def to_dict(self) -> dict[str, Any]:
        e = self.estimate
        return {
            "study": self.arm.config.study,
            "scale": self.arm.config.scale,
            "kind": self.comparison,
            "arm": self.arm.id,
            "reference": self.reference.id,
            "metric": self.metric,
            "rule": self.rule.name,
            "margins": list(self.rule.margins),
            "equivalence": self.rule.equivalence,
            "state": self.state,
            "n": self.n,
            "difference": e.value if e else None,
            "interval": e.interval if e else None,
            "level": e.level if e else None,
            "seed_sd": e.seed_sd if e else None,
            "chance": self.chance,
            "expected_seeds": self.expected,
            "why": self.why,
        }


def rules_of(kind: Kind, arm: Arm) -> list[Rule]:
    """Return the rules that apply when `arm` is compared with its reference of this kind."""
    perplexity = arm.config.task != "classification"
    rules = []
    if kind in ("baseline", "control"):
        rules.append(PPL_TARGET if perplexity else ACCURACY_TARGET)
    if kind == "baseline" and not perplexity and arm.config.model.family == "gpt":
        rules.append(SCENARIO)
    if kind in ("control", "bias") and perplexity:
        rules.append(PPL_GOAL)
    return [*rules, PPL_SIGN if perplexity else ACCURACY_SIGN]


def answer_questions(
    arms: Sequence[Arm], seeds: Sequence[int], max_seeds: int, rules: Collection[str] = RULES
) -> list[Question]:
    """Return every question of a study with its present answer.

    These are the questions in the configs of the arms (from a study file). If there are none, one question
    is asked for each pair of a frozen arm and a reference, and for each of the rules in `rules`.

    arms: all arms of the study, including those without finished runs
    seeds: all seeds of the study in the order in which they are used
    """
    names = guards.datasets_by_test_rows(arms)
    found: list[Question] = []
    for arm in arms:
        for asked in arm.config.compare.questions:
            rule = question_rule(asked, perplexity=arm.config.task != "classification")
            pair = Pair("baseline", arm, asked.reference, find_arm(arms, arm, asked.reference))
            if pair.reference is None:
                raise UsageError(
                    f"{arm.id} has a question about {asked.reference}, which is not among the arms of this "
                    f"study; select {asked.reference}, too"
                )
            found += answer_pair(pair, [rule], seeds, max_seeds, guards.other_names(arm, names))
    if found:
        return found
    for pair in find_pairs(arms):
        if pair.reference is not None and pair.arm.method.freeze != "none":
            named = [rule for rule in rules_of(pair.kind, pair.arm) if rule.name in rules]
            found += answer_pair(pair, named, seeds, max_seeds, guards.other_names(pair.arm, names))
    return found


def answer_pair(
    pair: Pair, rules: Iterable[Rule], seeds: Sequence[int], max_seeds: int, same_rows: Sequence[str] = ()
) -> list[Question]:
    """Return one question per rule about a pair of arms, with its present answer.

    seeds: all seeds of the study in the order in which they are used
    same_rows: names of other datasets in this analysis that have the same test rows
    """
    arm, reference = pair.arm, pair.reference
    assert reference is not None
    paired = _leading_pairs(arm, reference, seeds)[:max_seeds]
    level = level_per_look(max_seeds)
    sides = {
        n: (arm.with_seeds(paired[:n]), reference.with_seeds(paired[:n])) for n in range(1, len(paired) + 1)
    }
    measured: dict[int, Effects] = {}

    def effects(n: int) -> Effects:
        if n not in measured:
            measured[n] = measure(*sides[n], level)
        return measured[n]

    questions = []
    for rule in rules:
        question = Question(pair.kind, arm, reference, rule, n=len(paired))
        why = _forbidden(arm, reference, same_rows) if not paired else ""
        for n in () if why else sides:
            why = _forbidden(*sides[n], same_rows)
            if why:
                question = replace(question, n=n)
                break
            if n < MIN_SEEDS:
                continue
            undecidable = guards.undecidable(*sides[n])
            question = take_look(question, _estimates(rule, effects(n)), max_seeds, withhold=undecidable)
            if not question.is_open:
                break
        if why:
            question = replace(question, state=NO_VERDICT, why=why)
        elif question.is_open and question.estimate is not None:
            question = replace(question, expected=seeds_expected(rule, question.estimate, max_seeds))
        questions.append(question)
    return questions


def take_look(question: Question, estimate: Estimate, max_seeds: int, *, withhold: str = "") -> Question:
    """Return a copy of `question` with the answer that one more look at the results gives.

    estimate: the difference between the arms at this look
    withhold: why there must be no verdict (`guards.undecidable()`); "" if there may be one
    """
    verdict = decide(question.rule, estimate, withhold=withhold, max_seeds=0)
    looked = replace(question, n=estimate.n, estimate=estimate)
    if verdict.decided:
        return replace(looked, state=verdict.outcome, chance=1.0)
    if verdict.reason:
        return replace(looked, state=NO_VERDICT, why=_NO_VERDICT[verdict.reason])
    if estimate.n >= max_seeds:
        return replace(looked, state=GIVEN_UP, why=f"undecided after the maximum of {max_seeds} seeds")
    # The probability of a verdict at the last possible look, which has the narrowest interval.
    chance = chance_of_verdict(question.rule, estimate, max_seeds)
    if chance < GIVE_UP:
        why = (
            "too close to the margin: the probability of a verdict with "
            f"{max_seeds} seeds is {100 * chance:.0f} %"
        )
        return replace(looked, state=GIVEN_UP, chance=chance, why=why)
    return replace(looked, chance=chance)


def _estimates(rule: Rule, effects: Effects) -> Estimate:
    return effects.effect if rule is SCENARIO else effects.ratio


def _leading_pairs(arm: Arm, reference: Arm, seeds: Sequence[int]) -> list[int]:
    """Return the seeds before the first one that lacks an ended run (finished or diverged) in an arm."""
    ended = arm.ended.keys() & reference.ended.keys()
    leading: list[int] = []
    for seed in seeds:
        if seed not in ended:
            break
        leading.append(seed)
    return leading


def _forbidden(arm: Arm, reference: Arm, same_rows: Sequence[str]) -> str:
    """Return why the two arms get no verdict with any number of seeds; "" if they may get one."""
    diverged = [
        f"{a.id} seed {seed}"
        for a in (arm, reference)
        for seed, state in a.ended.items()
        if state == DIVERGED
    ]
    if diverged:
        return f"runs diverged and are not in the mean, so there is no verdict: {', '.join(diverged)}"
    if arm.finished and reference.finished and (refused := guards.refusals(arm, reference)):
        return f"not comparable: {'; '.join(map(str, refused))}"
    return "; ".join(map(str, guards.caveats(arm, reference, same_rows)))


_NO_VERDICT = {
    "chance": "the reference model did not learn the task (accuracy at chance)",
    "identical": "both arms gave the same result for every seed",
    "no variation": "every seed gave exactly the same difference",
}
