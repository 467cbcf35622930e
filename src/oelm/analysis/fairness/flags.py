"""Flags: sentences that tell the reader of a comparison about a problem, for example that runs are missing.

Each function returns the flags of one kind, or an empty list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from oelm.analysis.arms import Arm
from oelm.analysis.fairness.guards import EQUAL_SETTINGS, RECORDED, at_chance, recorded, setting_differences
from oelm.analysis.load import DIVERGED, FINISHED, LoadedRun
from oelm.analysis.messages import Message, state_name
from oelm.analysis.statistics.effects import Effects
from oelm.config.diff import config_diff


def run_flags(arm: Arm, reference: Arm, trials: Sequence[LoadedRun]) -> tuple[Message, ...]:
    """Return flags about the runs of a comparison, their settings and their tuning trials."""
    found = [
        *smoke_scale(arm),
        *missing_runs(arm, reference),
        *unfinished_with_other_settings(arm),
        *unfinished_with_other_settings(reference),
        *selected_on_test(arm, reference, trials),
        *failed_audits(arm),
        *weak_tuning(arm, reference, trials),
        *other_settings(arm, reference),
        *unrecorded(arm, reference),
        *identical_seeds(arm),
        *identical_seeds(reference),
    ]
    return tuple(dict.fromkeys(found))


def smoke_scale(arm: Arm) -> list[Message]:
    """Return a flag at scale `smoke`, where a run may have two steps; both arms have the same scale."""
    if arm.config.scale != "smoke":
        return []
    return [Message("scale smoke only shows that the program works: its verdicts mean nothing")]


def result_flags(measured: Effects, reference: Arm) -> list[Message]:
    """Return flags about the measured difference between two arms."""
    found, effect = [], measured.effect
    if at_chance(reference):
        found.append(
            Message(
                "{id} did not learn the task: its accuracy is no better than always predicting the most "
                "frequent class",
                id=reference.id,
            )
        )
    seeds = ", ".join(map(str, effect.unpaired))
    if effect.interval_kind == "Welch":
        found.append(
            Message(
                "some seeds were run in one arm only ({seeds}): Welch's interval over all seeds is used "
                "instead of pairs",
                seeds=seeds,
            )
        )
    elif effect.unpaired:
        found.append(Message("seeds that were run in one arm only are left out: {seeds}", seeds=seeds))
    if effect.interval_kind == "none":
        found.append(Message("an arm has only one seed, so there is no confidence interval and no verdict"))
    if measured.test_error == "binomial":
        found.append(
            Message(
                "predictions are missing, so the test-set error is estimated from unpaired binomial "
                "distributions, and the interval is too wide"
            )
        )
    return found


def missing_runs(arm: Arm, reference: Arm) -> list[Message]:
    """Return flags for runs that diverged or have not finished."""
    found = []
    runs = (*arm.runs, *reference.runs)
    if diverged := [r for r in runs if r.state == DIVERGED]:
        found.append(
            Message(
                "1 run diverged and is not in the mean, so there is no verdict: {runs}",
                runs=_names(diverged),
            )
            if len(diverged) == 1
            else Message(
                "{n} runs diverged and are not in the mean, so there is no verdict: {runs}",
                n=len(diverged),
                runs=_names(diverged),
            )
        )
    if unfinished := [r for r in runs if r.state not in (FINISHED, DIVERGED)]:
        names = tuple(
            Message("{id} seed {seed} ({state})", id=r.id, seed=r.seed, state=state_name(r.state))
            for r in unfinished
        )
        found.append(
            Message("1 run is not finished: {runs}", runs=names)
            if len(unfinished) == 1
            else Message("{n} runs are not finished: {runs}", n=len(unfinished), runs=names)
        )
    return found


def unfinished_with_other_settings(arm: Arm) -> list[Message]:
    """Return a flag for each run that has not finished and has different settings than the finished runs."""
    found = []
    for run in arm.runs if arm.finished else ():
        if run.state == FINISHED:
            continue
        if fields := tuple(config_diff(run.config, replace(arm.config, seed=run.seed))):
            found.append(
                Message(
                    "{id} seed {seed} is not finished and has different settings than the finished runs: "
                    "{fields}",
                    id=arm.id,
                    seed=run.seed,
                    fields=fields,
                )
            )
    return found


def selected_on_test(arm: Arm, reference: Arm, trials: Sequence[LoadedRun]) -> list[Message]:
    """Return flags for runs whose learning rate or checkpoint may have been selected on the test split."""
    found = []
    ids = {arm.id, reference.id}
    if tested := [t for t in trials if t.id in ids and t.result and t.result.test is not None]:
        found.append(
            Message(
                "tuning trials were evaluated on the test split, so it may have influenced the choice of the "
                "learning rate: {runs}",
                runs=_names(tested),
            )
        )
    if selected := [r for r in (*arm.finished, *reference.finished) if _validated_on_test(r)]:
        found.append(
            Message(
                "the checkpoint was selected on the reported split, so its score is too optimistic: {runs}",
                runs=_names(selected),
            )
        )
    return found


def _validated_on_test(run: LoadedRun) -> bool:
    prints = run.manifest.data.fingerprints
    validation = prints.get("validation")
    return bool(run.result and validation and validation == run.result.fairness.eval_set)


def failed_audits(arm: Arm) -> list[Message]:
    """Return a flag if the freeze audit of a run found that frozen parameters had changed."""
    failed = [r for r in arm.finished if not r.audited]
    if not failed:
        return []
    return [Message("frozen parameters changed (the freeze audit failed): {runs}", runs=_names(failed))]


def weak_tuning(arm: Arm, reference: Arm, trials: Sequence[LoadedRun]) -> list[Message]:
    """Return flags for missing trials and for learning rates that are not tuned or at the edge of a grid."""
    a, b = arm.finished[0].config, reference.finished[0].config
    found = []
    if not a.tune.grid and not b.tune.grid and a.optim.lr == b.optim.lr:
        found.append(
            Message("the learning rate was not tuned for either arm ({lr} for both)", lr=f"{a.optim.lr:g}")
        )
    for config in (a, b):
        grid = config.tune.grid
        if len(grid) > 2 and config.optim.lr in (min(grid), max(grid)):
            found.append(
                Message(
                    "the learning rate of {id} ({lr}) is at the edge of its grid; a better one may lie "
                    "outside",
                    id=config.id,
                    lr=f"{config.optim.lr:g}",
                )
            )
        own = [t for t in trials if t.config.arm_key == config.arm_key]
        # Any tuning has at least these trials: every learning rate with the first trial seed, and the chosen
        # learning rate with all trial seeds.
        # Without any seed or trial, the seed -1, which no trial has, makes all of them count as missing.
        seeds = config.tune.seeds or tuple(t.seed for t in own[:1]) or (-1,)
        needed = {(lr, s) for lr in grid for s in seeds[:1]} | {(config.optim.lr, s) for s in seeds if grid}
        ended = {(t.config.optim.lr, t.seed) for t in own if t.result or t.state == DIVERGED}
        have, total = len(needed & ended), len(needed)
        if have < total:
            found.append(
                Message(
                    "{id}: only {have} of {total} tuning trials are in this runs folder",
                    id=config.id,
                    have=have,
                    total=total,
                )
            )
    return found


def other_settings(arm: Arm, reference: Arm) -> list[Message]:
    """Return flags for differences in the model or in settings that do not make the comparison invalid."""
    found = []
    for name, (mine, theirs) in setting_differences(arm, reference).items():
        if name in EQUAL_SETTINGS:
            continue
        values = {"field": name, "arm": mine, "reference": theirs}
        if name.startswith("model."):
            found.append(
                Message(
                    "different architecture, {field}: {arm} against {reference}; architecture gains are not "
                    "attributed to freezing",
                    **values,
                )
            )
        else:
            found.append(Message("different setting, {field}: {arm} against {reference}", **values))
    return found


def unrecorded(arm: Arm, reference: Arm) -> list[Message]:
    """Return a flag that lists the values which could not be compared, because neither arm recorded them."""
    fields = tuple(
        what for name, what in RECORDED.items() if recorded(arm, name) == {""} == recorded(reference, name)
    )
    if not fields:
        return []
    return [Message("not checked, because neither arm recorded it: {fields}", fields=fields)]


def identical_seeds(arm: Arm) -> list[Message]:
    """Return a flag if all seeds of an arm have the same perplexity or the same predictions.

    The runs are then probably copies of each other, or the seed has no effect. Classifiers whose predictions
    are all correct, or all of one class, may agree without being copies.
    """
    if len(arm.scores) < 2 or len(set(arm.scores.values())) > 1:
        return []
    if arm.metric == "accuracy":
        hits = [r.hits for r in arm.finished if r.hits is not None]
        same = len(hits) == len(arm.finished) and all(np.array_equal(hits[0], h) for h in hits[1:])
        if not same or arm.mean == 1 or at_chance(arm):
            return []
    return [
        Message(
            "all {n} seeds of {id} have exactly the same result: the seed seems to have no effect",
            id=arm.id,
            n=len(arm.scores),
        )
    ]


def _names(runs: Iterable[LoadedRun]) -> tuple[Message, ...]:
    return tuple(Message("{id} seed {seed}", id=r.id, seed=r.seed) for r in runs)
