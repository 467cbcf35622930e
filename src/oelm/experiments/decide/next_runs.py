"""Choose the runs that follow: those with the best chance of a verdict per hour of training.

A step of a question is its next paired seed (its first three seeds, if it has fewer). Its value is the
predicted probability that the question is decided by that step. Steps of several questions often need the
same runs, for example those of a shared baseline: a run counts once, and its step counts for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from oelm.analysis.futility import chance_of_verdict
from oelm.analysis.questions import Question, QuestionKey
from oelm.analysis.sequential import MIN_SEEDS

ArmKey = tuple[str, str, str]  # study, scale, experiment ID
RunKey = tuple[ArmKey, int]  # an arm and a seed

# The value of a question without three paired seeds, whose chance cannot be predicted yet.
FIRST_LOOK_CHANCE = 0.3


def missing_runs(question: Question, seeds: Sequence[int]) -> list[RunKey]:
    """Return the runs that the next look at this question needs and that have not ended; [] if closed."""
    if not question.is_open:
        return []
    wanted = seeds[: max(MIN_SEEDS, question.n + 1)]
    return [
        (arm.key, seed)
        for seed in wanted
        for arm in (question.arm, question.reference)
        if seed not in arm.ended
    ]


def next_chance(question: Question) -> float:
    """Return the predicted probability that the next look decides the question."""
    if question.estimate is None:
        return FIRST_LOOK_CHANCE
    # At least a little, so that a question whose verdict is several seeds away goes on when all others ended.
    return max(1e-3, chance_of_verdict(question.rule, question.estimate, question.n + 1))


def next_runs(
    questions: Sequence[Question],
    seeds: Sequence[int],
    seconds: Mapping[ArmKey, float],
    *,
    width: int,
    most_seconds: float = float("inf"),
    failed: Collection[RunKey] = (),
) -> list[RunKey]:
    """Return the next runs, at most as many steps as needed to fill `width` slots.

    seconds: time of one run of each arm
    most_seconds: what is left of the budget; a step that needs more is left out
    failed: runs that failed in this session; their questions wait for the user
    """
    steps = {q.key: frozenset(missing_runs(q, seeds)) for q in questions if q.is_open}
    steps = {key: runs for key, runs in steps.items() if runs and not runs & set(failed)}
    value = {q.key: next_chance(q) for q in questions if q.key in steps}
    chosen: dict[RunKey, None] = {}  # a dict keeps the order
    while steps and len(chosen) < width:
        done = set(chosen)
        rate = partial(_verdicts_per_second, steps=steps, value=value, done=done, seconds=seconds)
        best = max(steps, key=rate)
        added = steps[best] - done
        if _cost(done | added, seconds) <= most_seconds:
            order = {seed: place for place, seed in enumerate(seeds)}
            chosen.update(dict.fromkeys(sorted(added, key=lambda run: (order[run[1]], run[0]))))
            steps = {key: runs for key, runs in steps.items() if not runs <= set(chosen)}
        else:
            del steps[best]
    return list(chosen)


def _verdicts_per_second(
    key: QuestionKey,
    steps: Mapping[QuestionKey, frozenset[RunKey]],
    value: Mapping[QuestionKey, float],
    done: set[RunKey],
    seconds: Mapping[ArmKey, float],
) -> float:
    """Return how many verdicts are expected per second from the step `key`, if the runs `done` come first."""
    after = done | steps[key]
    gained = sum(value[other] for other, runs in steps.items() if runs <= after)
    return gained / max(1e-9, _cost(steps[key] - done, seconds))


def _cost(runs: Collection[RunKey], seconds: Mapping[ArmKey, float]) -> float:
    return sum(seconds[arm] for arm, _ in runs)
