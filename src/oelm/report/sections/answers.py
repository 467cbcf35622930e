"""Make the table of the questions in study files, with their answers."""

from __future__ import annotations

from dataclasses import replace

from oelm.analysis.analyze import Analysis
from oelm.analysis.answers import Answer
from oelm.analysis.messages import Message
from oelm.analysis.verdict import MET, MISSED
from oelm.report import numbers
from oelm.report.document import Block, Paragraph, Row, Table, Text
from oelm.report.sections.comparisons import notes
from oelm.report.sentences import outcome, place, tone
from oelm.report.summary import linked
from oelm.report.translate import Translator

RULES = {
    "non-inferior": Message("at most {margin} worse?"),
    "superior": Message("better by more than {margin}?"),
    "equivalent": Message("equal within ± {margin}?"),
}
ANSWERS = {MET: Message("yes"), MISSED: Message("no")}


def question_table(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table of the questions of study files with their answers; [] if there is no question."""
    if not analysis.answers:
        return []
    about = _(
        "Margins and changes are relative to the score of the reference. The answer is yes or no if the "
        "confidence interval lies on one side of the margin."
    )
    arms = (_("Data"), _("Arm"), _("Against"))
    head = (*arms, _("Question"), _("Answer"), _("Change"), _("95 % interval"), "n")
    rows = tuple(_row(answer, _) for answer in analysis.answers)
    made = [
        replace(a.comparison, target=a.verdict)
        for a in analysis.answers
        if a.comparison is not None and a.verdict is not None
    ]
    return [Paragraph(about), Table(head, rows, words=5, verdict=4), *notes(made, _)]


def _row(answer: Answer, _: Translator) -> Row:
    arm, question, c, verdict = answer.arm, answer.question, answer.comparison, answer.verdict
    asked = _(Message(RULES[question.rule].template, margin=f"{100 * question.margin:g} %"))
    names: tuple[Text, ...] = (place(arm, _), linked(arm.name, arm))
    if c is None or verdict is None:
        return Row((*names, question.reference, asked, _("waiting for finished runs"), "–", "–", "–"))
    said = _(ANSWERS.get(verdict.outcome) or outcome(verdict))
    cells: tuple[Text, ...] = ("–", "–", "–")
    if c.ratio is not None:
        interval = _(numbers.interval(c.ratio, "ppl"))
        cells = (linked(numbers.change(c.ratio.value), arm), linked(interval, arm), numbers.seeds(c.ratio))
    return Row((*names, linked(c.reference.name, c.reference), asked, said, *cells), tone(verdict))
