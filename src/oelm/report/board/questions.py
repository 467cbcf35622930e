"""`ShownQuestion`: a question about an arm and a reference arm, with its answer if there is one yet.

Questions come from study files, and from the comparisons that every analysis makes (`analysis.pairs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oelm.analysis.answers import answers
from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison, Comparisons
from oelm.analysis.load import LoadedRun
from oelm.analysis.messages import Message
from oelm.analysis.pairs import find_arm, find_pairs
from oelm.analysis.verdict import TARGET, Rule, Verdict, question_rule
from oelm.config.run_config import QuestionConfig
from oelm.report import numbers
from oelm.report.document import Tone
from oelm.report.sections.answers import ANSWERS, RULES
from oelm.report.sentences import conclusion, outcome, sentences, shown_verdict, tone, why_undecided

_TARGET = QuestionConfig("", "non-inferior", TARGET)


@dataclass(frozen=True, eq=False)
class ShownQuestion:
    """A question about an arm and a reference arm; `comparison` is None until both have finished runs."""

    kind: str  # the rule ("target", ...) if a study file asks; otherwise "baseline", "control", ...
    arm: Arm
    reference: str  # experiment ID of the reference arm
    reference_name: str
    asked: Message
    comparison: Comparison | None = None
    verdict: Verdict | None = None
    margins: tuple[float, ...] = ()  # in per cent of the reference's score

    @property
    def study(self) -> str:
        return self.arm.config.study

    @property
    def decided(self) -> bool:
        return self.verdict is not None and self.verdict.decided

    @property
    def title(self) -> Message:
        return Message("{arm} against {reference}", arm=self.arm.name, reference=self.reference_name)

    @property
    def answer(self) -> Message:
        """The verdict in a few words."""
        if self.verdict is None:
            return Message("waiting for finished runs")
        said = ANSWERS.get(self.verdict.outcome) if self.kind in RULES else None
        return said or outcome(self.verdict)

    @property
    def tone(self) -> Tone:
        return tone(self.verdict) if self.verdict else ""

    @property
    def note(self) -> Message | None:
        """One sentence: the answer, or why the question is undecided; None if there is nothing to say yet."""
        if self.comparison is None or self.verdict is None:
            return None
        if self.verdict.decided:
            return conclusion(self.comparison)
        why = self.comparison.refused or self.comparison.caveats or why_undecided(self.verdict)
        return Message("{why}", why=why) if why else None

    @property
    def sentences(self) -> tuple[Message, ...]:
        """Sentences about the difference (with confidence interval and number of seeds) and the verdict."""
        if self.comparison is None:
            return (self.asked, self.answer)
        found = sentences(self.comparison)
        return (found[0], self.asked) if self.kind in RULES else found

    def key(self) -> dict[str, str]:
        """Return the URL parameters that identify the page of this question."""
        scale = self.arm.config.scale
        # A study file may ask by the same rule with several margins.
        margins = ",".join(f"{margin:.6g}" for margin in self.margins) if self.kind in RULES else ""
        key = {"kind": self.kind, "scale": scale, "arm": self.arm.id, "reference": self.reference}
        return key | {"margins": margins}


def all_questions(made: Comparisons, trials: Sequence[LoadedRun]) -> tuple[ShownQuestion, ...]:
    """Return the questions of study files, then those of all other comparisons."""
    own = list(_from_study_files(made.arms, trials))
    asked = {(q.arm.key, q.reference) for q in own}
    others = (q for q in _from_comparisons(made) if (q.arm.key, q.reference) not in asked)
    return (*own, *others)


def _from_study_files(arms: Sequence[Arm], trials: Sequence[LoadedRun]) -> Iterator[ShownQuestion]:
    for a in answers(arms, trials):
        reference, c = find_arm(arms, a.arm, a.question.reference), a.comparison
        margins = _percent(question_rule(a.question, perplexity=a.arm.config.task != "classification"))
        name = reference.name if reference else a.question.reference
        asked = _asked(a.question)
        yield ShownQuestion(a.question.rule, a.arm, a.question.reference, name, asked, c, a.verdict, margins)


def _from_comparisons(made: Comparisons) -> Iterator[ShownQuestion]:
    found = {(c.kind, c.arm.key, c.reference.id): c for c in made.made}
    for pair in find_pairs(made.arms):
        c = found.get((pair.kind, pair.arm.key, pair.reference_id))
        name = pair.reference.name if pair.reference else pair.reference_id
        on_target = pair.kind in ("baseline", "control")
        asked = _asked(_TARGET) if on_target else Message("which of the two is better?")
        margins = _percent(question_rule(_TARGET, perplexity=c.metric == "ppl")) if c and on_target else ()
        verdict = shown_verdict(c) if c else None
        yield ShownQuestion(pair.kind, pair.arm, pair.reference_id, name, asked, c, verdict, margins)


def _asked(question: QuestionConfig) -> Message:
    return Message(RULES[question.rule].template, margin=f"{100 * question.margin:g} %")


def _percent(rule: Rule) -> tuple[float, ...]:
    return tuple(map(numbers.percent, rule.margins))
