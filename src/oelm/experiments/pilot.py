"""The pilot of a study: one arm and its baseline run first, and decide whether the other runs start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oelm.experiments.launch.jobs import Job
from oelm.runs.folder import RunFolder

if TYPE_CHECKING:
    from oelm.experiments.study import ArmPlan

# The largest ratio in the original study is 1.16. A pilot should find broken runs, not decide the question.
PILOT_FACTOR = 1.5


def pilot_pair(arms: Sequence[ArmPlan]) -> list[ArmPlan]:
    """A baseline and the first arm compared with it; only the first arm if no baseline is planned."""
    planned = {(arm.id, arm.scale): arm for arm in arms}
    for arm in arms:
        baseline = planned.get((arm.experiment.baseline, arm.scale))
        if baseline is not None:
            return [baseline, arm]
    return list(arms[:1])


def pilot_problems(
    pair: Sequence[ArmPlan], jobs: Sequence[Job], factor: float, say: Callable[[str], None]
) -> list[str]:
    """Why the other runs should not start; [] if the pilot passed.

    A pilot fails if a run did not finish, its freeze audit failed, or the arm is worse than the baseline by
    more than `factor`.
    """
    order = [arm.id for arm in pair]
    runs = sorted(
        (job for job in jobs if not job.config.tune.trial), key=lambda job: order.index(job.config.id)
    )
    found = [f"{job.name}: {problem}" for job in runs if (problem := _run_problem(job))]
    if len(runs) < len(pair):
        unfinished = [f"{job.name}: {job.state} {job.reason}".strip() for job in jobs if not job.ended]
        found += unfinished or ["not all of its tuning trials have ended"]
    if found:
        return found
    if len(pair) < 2:
        say("pilot passed; its quality was not checked, because its baseline is not among the runs")
        return []
    comparison, ratio = _compare(*runs)
    limit = f"(the limit is {factor:g}, --pilot-factor)"
    if not ratio <= factor:
        return [f"{comparison} {limit}"]
    say(f"pilot passed: {comparison} {limit}")
    return []


def _compare(baseline: Job, arm: Job) -> tuple[str, float]:
    """A sentence, and how many times worse the arm is on validation: ratio of perplexities or accuracies."""
    found = [RunFolder(job.folder).results() for job in (baseline, arm)]
    metric = found[0].metric if found[0] else ""
    reference, value = ((results.score("validation") if results else None) or 0.0 for results in found)
    better, worse = (value, reference) if metric == "accuracy" else (reference, value)
    ratio = worse / better if better else (1.0 if worse == better else math.inf)
    text = f"{arm.config.id} has validation {metric} {value:.4g}, {baseline.config.id} {reference:.4g}"
    return f"{text}, a factor of {ratio:.3g}", ratio


def _run_problem(job: Job) -> str:
    """Why this pilot run stops the others; "" if it does not."""
    if job.state != "finished":
        return f"{job.state} {job.reason}".strip()
    folder = RunFolder(job.folder)
    results, audit = folder.results(), folder.freeze_audit()
    if results is None or results.validation is None:
        return "no finite validation loss"
    if audit is not None and not audit.ok:
        return f"the freeze audit failed (see {folder.audit_file})"
    return ""
