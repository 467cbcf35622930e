"""Sentences about comparisons: the same words in the terminal, the report and the claims page."""

from __future__ import annotations

from typing import Any

from oelm.analysis.compare import Arm, Comparison
from oelm.analysis.messages import Message, say, state_name
from oelm.analysis.verdict import (
    BETTER,
    FAILS,
    HOLDS,
    NO_INTERVAL,
    REFUSED,
    UNDECIDED,
    WITHHELD,
    WORSE,
    Verdict,
)
from oelm.report import numbers
from oelm.report.document import Tone

_TONES: dict[str, Tone] = {HOLDS: "good", BETTER: "good", "A": "good", FAILS: "bad", WORSE: "bad", "B": "bad"}


class Words:
    """The strings table bound to a language."""

    def __init__(self, lang: str = "en") -> None:
        self.lang = lang

    def __call__(self, key: str, **values: Any) -> str:
        return say(key, **values).text(self.lang)

    def tell(self, message: Message) -> str:
        return message.text(self.lang)

    def state(self, name: str) -> str:
        shown = state_name(name)
        return shown if isinstance(shown, str) else self.tell(shown)


def place(arm: Arm, w: Words) -> str:
    """Where an arm was compared, for a table cell."""
    return f"{arm.group} ({w(f'scale.{arm.config.scale}')})"


def tone(verdict: Verdict) -> Tone:
    return _TONES.get(verdict.outcome, "open")


def outcome(verdict: Verdict) -> Message:
    """A few words for a table cell."""
    if verdict.rule == "scenario" and verdict.decided:
        return say("outcome.scenario", name=verdict.outcome)
    return say(f"outcome.{verdict.outcome}")


def settle(verdict: Verdict) -> Message | None:
    """What it would take to decide."""
    if verdict.outcome == WITHHELD:  # its comparison's caveats say why
        return None
    if verdict.because:
        return say(f"because.{verdict.because}")
    if verdict.needed is None:
        return None
    if verdict.needed.seeds is not None:
        return say("needed.seeds", n=verdict.needed.seeds)
    if verdict.needed.limit == "wide":
        return say("needed.wide", n=verdict.needed.have)
    return say(f"needed.{verdict.needed.limit}")


def plainly(comparison: Comparison) -> Message | None:
    """Its outcome without a figure's fine print; None where there is none."""
    c = comparison
    if c.caveats:
        return no_verdict(c)
    if c.kind == "orthogonality":
        return say("asks.orthogonality")  # the answer is the last sentence
    if c.effect is None or c.sign.outcome not in (BETTER, WORSE, UNDECIDED):
        return None
    unknown = c.sign.because or (c.sign.needed is not None and c.sign.needed.limit in ("wide", "spread"))
    if c.sign.outcome == UNDECIDED and unknown:  # "no significant cost" would claim too much
        return say("plain.unjudged", arm=c.arm.name, reference=c.reference.name)
    size = say(f"size.{c.metric}", value=numbers.effect(c.effect, c.metric).lstrip("+" + numbers.MINUS))
    return say(f"plain.{c.kind}.{c.sign.outcome}", arm=c.arm.name, reference=c.reference.name, size=size)


def what_it_says(comparison: Comparison) -> tuple[Message, ...]:
    """A comparison in sentences: the difference with its interval and n, then the verdicts."""
    c = comparison
    if c.effect is None:
        return (say("sentence.refused", arm=c.arm.name, reference=c.reference.name, why=c.refused),)
    lines = [
        say(
            f"sentence.{c.metric}",
            arm=c.arm.name,
            reference=c.reference.name,
            effect=numbers.effect(c.effect, c.metric),
            interval=numbers.interval(c.effect, c.metric),
            n=f"n = {numbers.seeds(c.effect)}",
        )
    ]
    if c.caveats:
        return (*lines, no_verdict(c))
    if c.kind == "orthogonality":
        lines.append(say(f"orthogonality.{c.sign.outcome}"))
    else:
        lines.append(_target(c.target))
    if c.scenario is not None and c.kind == "baseline":
        lines.append(_scenario(c.scenario))
    return tuple(lines)


def no_verdict(comparison: Comparison) -> Message:
    return say("withheld", why=comparison.caveats)


def _target(verdict: Verdict) -> Message:
    more = settle(verdict)
    if verdict.outcome in (UNDECIDED, NO_INTERVAL) and more is not None:
        return say(f"target.{verdict.outcome}", more=more)
    return say(f"target.{verdict.outcome}", more="")


def _scenario(verdict: Verdict) -> Message:
    if verdict.decided:
        return say("scenario.decided", name=verdict.outcome, meaning=say(f"scenario.{verdict.outcome}"))
    more = settle(verdict) or ""
    if verdict.outcome == NO_INTERVAL or verdict.because or len(verdict.possible) < 2:
        return say("scenario.no interval", more=more)
    return say("scenario.undecided", possible=" / ".join(sorted(verdict.possible)), more=more)


def badge(comparison: Comparison) -> Message:
    if comparison.target.outcome == REFUSED:
        return say("outcome.refused")
    return outcome(comparison.sign if comparison.kind == "orthogonality" else comparison.target)
