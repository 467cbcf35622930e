"""Write comparisons and verdicts as sentences, for the terminal, the report and the claims page."""

from __future__ import annotations

from oelm.analysis.arms import Arm
from oelm.analysis.compare import Comparison
from oelm.analysis.messages import Message
from oelm.analysis.pairs import other_than_freezing
from oelm.analysis.verdict import (
    BETTER,
    EQUIVALENT,
    MET,
    MISSED,
    NO_INTERVAL,
    REFUSED,
    UNDECIDED,
    WITHHELD,
    WORSE,
    Verdict,
)
from oelm.report import numbers
from oelm.report.document import Tone
from oelm.report.translate import Translator

TONES: dict[str, Tone] = {MET: "good", BETTER: "good", "A": "good", MISSED: "bad", WORSE: "bad", "B": "bad"}
SCALES = {"full": Message("full"), "mini": Message("mini"), "smoke": Message("smoke")}
TASKS = {
    "lm": Message("Language modelling"),
    "classification": Message("Classification"),
    "denoising": Message("Denoising"),
    "generation": Message("Generation"),
}
OUTCOMES = {
    MET: Message("within 5 %"),
    MISSED: Message("misses 5 %"),
    BETTER: Message("better"),
    WORSE: Message("worse"),
    EQUIVALENT: Message("equivalent (within 1 %)"),
    UNDECIDED: Message("undecided"),
    NO_INTERVAL: Message("n = 1, no interval"),
    REFUSED: Message("not comparable"),
    WITHHELD: Message("no verdict"),
    "A": Message("scenario A"),
    "B": Message("scenario B"),
    "C": Message("scenario C"),
}
REASONS = {  # reasons why a confidence interval decides nothing
    "diverged": Message("a run diverged, and the interval leaves it out, so there is no verdict"),
    "chance": Message(
        "the reference model did not learn the task (accuracy at chance), so no comparison is possible"
    ),
    "identical": Message("both arms gave the same result for every seed, so the seed variation is unknown"),
    "no variation": Message("every seed gave exactly the same difference, so the seed variation is unknown"),
}
NOT_PLANNED = {  # for undecided verdicts, if it cannot be said how many seeds would decide them
    "spread": Message("run at least 3 seeds"),
    "test set": Message("the test set is too small to decide, with any number of seeds"),
    "too close": Message("too close to the margin to decide with a realistic number of seeds"),
    "given up": Message("the sequential rule stopped, because more seeds would probably not decide it"),
}
SCENARIOS = {
    "A": Message("the task type decides"),
    "B": Message("the architecture decides"),
    "C": Message("needs more analysis"),
}
ORTHOGONALITY = {
    BETTER: Message("Orthonormal rows did better than Gaussian rows of the same norm."),
    WORSE: Message("Orthonormal rows did worse than Gaussian rows of the same norm."),
    EQUIVALENT: Message("Orthonormal and Gaussian rows of the same norm differ by less than 1 %."),
    UNDECIDED: Message("No significant effect of orthogonality beyond scale."),
    NO_INTERVAL: Message("One seed is not enough to judge orthogonality."),
}


def place(arm: Arm, _: Translator) -> str:
    """Return the comparison group and the scale of an arm, for a table cell."""
    return _("{name} ({scale})", name=arm.group, scale=SCALES[arm.config.scale])


def group_title(comparison: Comparison, _: Translator) -> str:
    config = comparison.arm.config
    return _(
        "{task} on {dataset}, {scale} scale ({group})",
        task=TASKS[config.task],
        dataset=config.data.dataset,
        group=comparison.group,
        scale=SCALES[config.scale],
    )


def tone(verdict: Verdict) -> Tone:
    return TONES.get(verdict.outcome, "open")


def outcome(verdict: Verdict) -> Message:
    """Return a verdict in a few words, for a table cell."""
    return OUTCOMES[verdict.outcome]


def shown_verdict(c: Comparison) -> Verdict:
    """Return the verdict to show for a comparison.

    For the kinds "baseline" and "control", it is the verdict on the 5 % target; for other kinds, the verdict
    on which arm is better.
    """
    return c.target if c.kind in ("baseline", "control") else c.sign


def why_undecided(verdict: Verdict) -> Message | None:
    """Return why a verdict is undecided, or how many seeds would decide it; None if it is decided."""
    if verdict.outcome == WITHHELD:  # the caveats of the comparison say why there is no verdict
        return None
    if verdict.reason:
        return REASONS[verdict.reason]
    if verdict.needed is None:
        return None
    if verdict.needed.seeds is not None:
        return Message("about {n} seeds in total would probably be enough", n=verdict.needed.seeds)
    if verdict.needed.limit == "wide":
        return Message(
            "with n = {n} seeds the interval is too wide to be informative; run more seeds",
            n=verdict.needed.have,
        )
    return NOT_PLANNED[verdict.needed.limit]


def no_verdict(comparison: Comparison) -> Message:
    return Message("No verdict: {why}.", why=comparison.caveats)


def conclusion(c: Comparison) -> Message | None:
    """Return the result of a comparison in one sentence, without its interval; None if there is no result."""
    if c.caveats:
        return no_verdict(c)
    if c.kind == "orthogonality":
        return Message("Orthogonality or scale?")  # `sentences()` contains the answer
    if c.effect is None or c.sign.outcome not in (BETTER, WORSE, EQUIVALENT, UNDECIDED):
        return None
    names = {"arm": c.arm.name, "reference": c.reference.name}
    unknown = c.sign.reason or (c.sign.needed is not None and c.sign.needed.limit in ("wide", "spread"))
    if c.sign.outcome == UNDECIDED and unknown:  # too little is known to write "no significant difference"
        return Message("{arm} and {reference}: no conclusion is possible yet.", **names)
    value = numbers.effect(c.effect, c.metric).lstrip("+" + numbers.MINUS)
    size = (
        Message("{value} of perplexity", value=value)
        if c.metric == "ppl"
        else Message("{value} points of accuracy", value=value)
    )
    if c.kind == "control" and not other_than_freezing(c.arm, c.reference):
        return _cost_of_freezing(c.sign.outcome, size, c.reference.name)
    if c.sign.outcome == WORSE:
        return Message("{arm} is worse than {reference} by {size}.", **names, size=size)
    if c.sign.outcome == BETTER:
        return Message("{arm} is better than {reference} by {size}.", **names, size=size)
    if c.sign.outcome == EQUIVALENT:
        return Message("{arm} and {reference} differ by less than 1 %.", **names)
    return Message("{arm} and {reference}: no significant difference.", **names)


def _cost_of_freezing(sign: str, size: Message, reference: str) -> Message:
    if sign == WORSE:
        return Message(
            "Freezing alone costs {size} ({reference} is the same network with trained Q/K).",
            size=size,
            reference=reference,
        )
    if sign == BETTER:
        return Message(
            "Freezing alone gains {size} ({reference} is the same network with trained Q/K).",
            size=size,
            reference=reference,
        )
    if sign == EQUIVALENT:
        return Message(
            "Freezing alone changes less than 1 % ({reference} is the same network with trained Q/K).",
            reference=reference,
        )
    return Message(
        "Freezing alone: no significant cost ({reference} is the same network with trained Q/K).",
        reference=reference,
    )


def sentences(c: Comparison) -> tuple[Message, ...]:
    """Return a comparison in sentences: the difference with its interval and n, then the verdicts.

    If the arms are not compared or there is no verdict, a sentence says why.
    """
    if c.effect is None:
        return (
            Message(
                "{arm} and {reference} are not compared: {why}.",
                arm=c.arm.name,
                reference=c.reference.name,
                why=c.refused,
            ),
        )
    values = {
        "arm": c.arm.name,
        "reference": c.reference.name,
        "effect": numbers.effect(c.effect, c.metric),
        "interval": numbers.interval(c.effect, c.metric),
        "n": numbers.seeds(c.effect),
    }
    if c.metric == "ppl":
        difference = Message(
            "{arm}: perplexity {effect} against {reference} (95 % confidence interval: {interval}; n = {n}).",
            **values,
        )
    else:
        difference = Message(
            "{arm}: accuracy {effect} points against {reference} "
            "(95 % confidence interval: {interval}; n = {n}).",
            **values,
        )
    if c.caveats:
        return difference, no_verdict(c)
    if c.kind == "orthogonality":
        return difference, ORTHOGONALITY[c.sign.outcome], *_stopped(c)
    if c.scenario is not None and c.kind == "baseline":
        return difference, _target(c.target), _scenario(c.scenario), *_stopped(c)
    return difference, _target(c.target), *_stopped(c)


def _stopped(c: Comparison) -> tuple[Message, ...]:
    """Return the sentence about how many seeds `oelm decide` needed for a verdict; () for other verdicts."""
    verdict = shown_verdict(c)
    if not verdict.stopped:
        return ()
    return (
        Message(
            "Stopped at n = {n} by the sequential rule (at most {most} seeds): the interval is valid "
            "although the results were looked at after every seed.",
            n=verdict.stopped,
            most=c.max_seeds,
        ),
    )


def _target(verdict: Verdict) -> Message:
    if verdict.outcome == MET:
        return Message("This is within the 5 % target.")
    if verdict.outcome == MISSED:
        return Message("This misses the 5 % target.")
    if verdict.outcome == UNDECIDED:
        return Message("Undecided against the 5 % margin: {why}.", why=why_undecided(verdict))
    return Message("No verdict: {why}.", why=why_undecided(verdict))


def _scenario(verdict: Verdict) -> Message:
    if verdict.decided:
        return Message(
            'Scenario {name}, which the original study reads as "{meaning}".',
            name=verdict.outcome,
            meaning=SCENARIOS[verdict.outcome],
        )
    why = why_undecided(verdict) or ""
    if verdict.outcome == NO_INTERVAL or verdict.reason or len(verdict.possible) < 2:
        return Message("No scenario: {why}.", why=why)
    return Message(
        "The scenario is undecided ({possible} possible): {why}.",
        possible=" / ".join(sorted(verdict.possible)),
        why=why,
    )
