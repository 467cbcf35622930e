"""Choose the runs to train next: those with the best chance of a verdict per hour of training.

Each open question has a "step": the runs that must end before `oelm decide` can look at the question again.
These are the runs of its next paired seed; before the first look, those of its first three seeds. The value
of a step is the predicted probability that the next look decides the question. Several questions often need
the same runs, for example those of a shared baseline. Such runs are trained once, and the values of all these
steps are added.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from oelm.analysis.questions import Question, QuestionKey
from oelm.analysis.statistics.futility import chance_of_verdict
from oelm.analysis.statistics.sequential import MIN_SEEDS
from oelm.config.run_config import ArmKey

RunKey = tuple[ArmKey, int]  # arm, seed

# Assumed probability that the first look at a question decides it; without results, nothing can be predicted.
FIRST_LOOK_CHANCE = 0.3


def missing_runs(question: Question, seeds: Sequence[int]) -> list[RunKey]:
    """Return the runs that the next look at a question needs and that have not ended.

    Returns [] if the question is closed.
    """
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
    # At least 0.001, so that a question that needs several more seeds still gets runs if no other is open.
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
    """Return the runs to train next, best first; [] if no question can continue.

    Questions are added, each with all runs that its next look needs, until there are at least `width` runs.

    width: number of runs that the launcher trains at the same time
    seconds: time of one run of each arm
    most_seconds: remaining training time of the budget; questions whose runs would exceed it are left out
    failed: runs that failed since the command started; questions that need them are left out
    """
    steps = {q.key: frozenset(missing_runs(q, seeds)) for q in questions if q.is_open}
    steps = {key: runs for key, runs in steps.items() if runs and not runs & set(failed)}
    value = {q.key: next_chance(q) for q in questions if q.key in steps}
    chosen: dict[RunKey, None] = {}  # used as an ordered set
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
    """Return how many verdicts per second of training are expected if the runs of question `key` are added.

    done: runs that have already been chosen, so they add no time
    """
    after = done | steps[key]
    gained = sum(value[other] for other, runs in steps.items() if runs <= after)
    return gained / max(1e-9, _cost(steps[key] - done, seconds))


def _cost(runs: Collection[RunKey], seconds: Mapping[ArmKey, float]) -> float:
    return sum(seconds[arm] for arm, _ in runs)
