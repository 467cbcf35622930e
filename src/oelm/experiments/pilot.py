"""The pilot of a study: one method and its baseline run first; the other runs start only if both succeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oelm.experiments.launch.jobs import Job
from oelm.runs.folder import RunFolder

if TYPE_CHECKING:
    from oelm.experiments.request import ArmPlan

# The pilot passes if the validation perplexity of the method is at most this many times that of the baseline
# (or if the accuracy of the baseline is at most this many times that of the method). The largest factor in
# the original study is 1.16; the limit is higher, because a pilot should stop only broken runs.
PILOT_FACTOR = 1.5


def pilot_pair(arms: Sequence[ArmPlan]) -> list[ArmPlan]:
    """Return a baseline and the first arm that is compared with it.

    If no arm's baseline is among `arms`, return only the first arm.
    """
    planned = {(arm.id, arm.scale): arm for arm in arms}
    for arm in arms:
        baseline = planned.get((arm.experiment.baseline, arm.scale))
        if baseline is not None:
            return [baseline, arm]
    return list(arms[:1])


def pilot_problems(
    pair: Sequence[ArmPlan], jobs: Sequence[Job], factor: float, say: Callable[[str], None]
) -> list[str]:
    """Return the reasons why the other runs of the study should not start; [] if the pilot passed.

    The pilot fails if one of its runs did not finish, if frozen weights changed in training (freeze audit),
    or if the arm is more than `factor` times worse than the baseline.

    pair: the baseline and the arm of the pilot (`pilot_pair()`)
    jobs: the runs and tuning trials of the pilot
    say: receives a message for the user if the pilot passed
    """
    order = [arm.id for arm in pair]
    runs = sorted(
        (job for job in jobs if not job.config.tune.trial), key=lambda job: order.index(job.config.id)
    )
    found = [f"{job.name}: {problem}" for job in runs if (problem := _run_problem(job))]
    if len(runs) < len(pair):
        unfinished = [f"{job.name}: {job.state} {job.reason}".strip() for job in jobs if not job.ended]
        found += unfinished or ["not all tuning trials of the pilot have ended"]
    if found:
        return found
    if len(pair) < 2:
        say(f"pilot passed; {pair[0].id} was not compared, because its baseline is not among the runs")
        return []
    comparison, ratio = _compare(*runs)
    limit = f"(the limit is {factor:g}, --pilot-factor)"
    if not ratio <= factor:
        return [f"{comparison} {limit}"]
    say(f"pilot passed: {comparison} {limit}")
    return []


def _compare(baseline: Job, arm: Job) -> tuple[str, float]:
    """Return (sentence for the user, factor by which the arm is worse on the validation split).

    The factor is the ratio of the two perplexities or accuracies.
    """
    found = [RunFolder(job.folder).results() for job in (baseline, arm)]
    metric = found[0].metric if found[0] else ""
    reference, value = ((results.score("validation") if results else None) or 0.0 for results in found)
    better, worse = (value, reference) if metric == "accuracy" else (reference, value)
    ratio = worse / better if better else (1.0 if worse == better else math.inf)
    text = f"{arm.config.id} has validation {metric} {value:.4g}, {baseline.config.id} {reference:.4g}"
    return f"{text}, a factor of {ratio:.3g}", ratio


def _run_problem(job: Job) -> str:
    """Return what is wrong with this pilot run; "" if nothing is."""
    if job.state != "finished":
        return f"{job.state} {job.reason}".strip()
    folder = RunFolder(job.folder)
    results, audit = folder.results(), folder.freeze_audit()
    if results is None or results.validation is None:
        return "the run has no finite validation loss"
    if audit is not None and not audit.ok:
        return f"the freeze audit failed (see {folder.audit_file})"
    return ""
