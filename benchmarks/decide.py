"""Simulate from stored runs how many hours `oelm decide` takes, and how many a fixed number of seeds takes.

The stored runs give the difference, the spread between seeds and the time of every comparison. From these
values, new studies are simulated with normally distributed differences, and both designs are applied to the
same simulated studies. An arm is trained with as many seeds as the longest of its questions needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oelm.analysis.arms import gather_arms
from oelm.analysis.load import load_runs
from oelm.analysis.questions import Question, answer_questions, take_look
from oelm.analysis.statistics.effects import measure
from oelm.analysis.statistics.intervals import Estimate, difference
from oelm.analysis.statistics.sequential import MIN_SEEDS, level_per_look
from oelm.analysis.verdict import SCENARIO, UNDECIDED, decide
from oelm.experiments.catalogue import planned_configs


def replay(
    root: Path, rules: Sequence[str], fixed: int, max_seeds: int, draws: int, studies: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the hours and verdicts of both designs, as means over `draws` simulated studies.

    root: folder of the stored runs
    fixed: number of seeds of the fixed design
    studies: only these studies; () = all

    "seeds_per_verdict" in the result is the number of seeds after which `oelm decide` reached a verdict, as a
    mean over the verdicts on which both designs agree.
    """
    asked = _questions(root, rules, studies)
    seconds = {arm.key: float(np.mean(times)) for q, _ in asked for arm in (q.arm, q.reference)
               if (times := [r.timing.total_wall_time or 0.0 for r in arm.finished])}  # fmt: skip
    rng = np.random.default_rng(0)
    hours, states, seeds_used = [], Counter[str](), []
    for _ in range(draws):
        seeds: dict[tuple[str, str, str], int] = {}
        drawn: dict[tuple[Any, ...], np.ndarray] = {}
        for q, e in asked:
            pair = (q.arm.key, q.reference.key, q.rule is SCENARIO)
            noise = drawn.setdefault(pair, rng.standard_normal(max(fixed, max_seeds)))
            d = e.value + (e.seed_sd or 0.0) * noise
            ended = _sequential(q, d[:max_seeds], e)
            at_fixed = decide(q.rule, _estimate(d[:fixed], e, 0.95), max_seeds=0)
            outcome = at_fixed.outcome if at_fixed.decided else UNDECIDED
            states[agreement := _agreement(ended, outcome)] += 1
            if agreement == "same verdict":
                seeds_used.append(ended.n)
            for arm in (q.arm, q.reference):
                seeds[arm.key] = max(seeds.get(arm.key, 0), ended.n)
        hours.append(sum(n * seconds[key] for key, n in seeds.items()) / 3600)
    fixed_hours = fixed * sum(seconds.values()) / 3600
    return {
        "rules": list(rules),
        "questions": len(asked),
        "arms": len(seconds),
        "fixed_seeds": fixed,
        "max_seeds": max_seeds,
        "fixed_hours": fixed_hours,
        "decide_hours": float(np.mean(hours)),
        "share": float(np.mean(hours)) / fixed_hours,
        "seeds_per_verdict": float(np.mean(seeds_used)) if seeds_used else None,
        "agreement": {name: n / draws for name, n in states.most_common()},
    }


def _questions(root: Path, rules: Sequence[str], studies: Sequence[str]) -> list[tuple[Question, Estimate]]:
    loaded = load_runs(root, studies)
    arms = [arm for arm in gather_arms(loaded.runs, planned_configs()) if arm.finished]
    found = []
    for q in answer_questions(arms, sorted({r.seed for r in loaded.runs}), 20, rules):
        shared = q.arm.ended.keys() & q.reference.ended.keys()
        if q.state == "no verdict" or len(shared) < MIN_SEEDS:
            continue
        effects = measure(q.arm.with_seeds(shared), q.reference.with_seeds(shared))
        estimate = effects.effect if q.rule is SCENARIO else effects.ratio
        if estimate.seed_sd:
            found.append((replace(q, state=UNDECIDED, n=0, estimate=None), estimate))
    return found


def _sequential(question: Question, d: np.ndarray, known: Estimate) -> Question:
    for n in range(MIN_SEEDS, len(d) + 1):
        question = take_look(question, _estimate(d[:n], known, level_per_look(len(d))), len(d))
        if not question.is_open:
            break
    return question


def _estimate(d: np.ndarray, known: Estimate, level: float) -> Estimate:
    zeros = dict.fromkeys(range(len(d)), 0.0)
    return difference(dict(enumerate(d.tolist())), zeros, test_se=known.test_se, level=level)


def _agreement(ended: Question, fixed: str) -> str:
    if not ended.decided:
        return "both undecided" if fixed == UNDECIDED else "decided by the fixed design only"
    if fixed == UNDECIDED:
        return "decided by `oelm decide` only"
    return "same verdict" if fixed == ended.state else "different verdicts"
