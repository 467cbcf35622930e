"""The loop of `oelm decide`: look at the runs, choose the next ones, train them, look again.

All state is in the run folders. If the command is killed at any moment, the same command continues, and
ends with the same decisions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.analysis.questions import Question, QuestionKey
from oelm.config.run_config import ArmKey, RunConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.decide.look import Design, Look, check_settings, look_at
from oelm.experiments.decide.next_runs import RunKey, missing_runs, next_runs
from oelm.experiments.launch.jobs import Job, Launcher, make_jobs, refuse_results_files
from oelm.experiments.tuning import Choice, Say
from oelm.files.locks import Lock, holder_name
from oelm.runs.progress import DecideProgress, write_decide_progress
from oelm.units import counted, duration_text

# Exit code if a question ends without a verdict: the budget is spent, it would need too many seeds, or its
# arms are not comparable.
EXIT_UNDECIDED = 3


@dataclass
class DecideOutcome:
    """How `oelm decide` ended: the answered questions, the runs that were started, and why it stopped."""

    look: Look
    jobs: list[Job] = field(default_factory=list)
    stopped: str = ""  # "budget", "interrupted" or "failed"; "" if no question is open any more
    choices: list[Choice] = field(default_factory=list)  # learning rates that tuning chose

    @property
    def questions(self) -> tuple[Question, ...]:
        return self.look.questions


class StudyLock(Lock):
    """Lock on a study folder, held by `oelm decide`; raises Busy if another `oelm decide` holds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / ".decide.lock", patience=0.0)

    def _busy(self) -> str:
        return (
            f"another `oelm decide` works on {self.path.parent}: {holder_name(self.path)}. Wait until it "
            "ends, or stop it first; nothing was changed"
        )


def lock_studies(design: Design, root: Path | str) -> ExitStack:
    """Lock all study folders of a design; the returned stack releases the locks when it is closed."""
    studies = sorted({c.study for c in design.configs})
    refuse_results_files(root, studies)
    with ExitStack() as stack:
        for study in studies:
            stack.enter_context(StudyLock(Path(root) / study))
        return stack.pop_all()


def require_questions(look: Look, design: Design) -> None:
    """Raise UsageError if the study has no question, or has a question that no number of seeds can answer."""
    for q in look.questions:
        if q.rule.name == "non-inferior" and q.rule.margins == (0.0,):
            raise UsageError(
                f"{q.arm.id} against {q.reference.id}: the rule non-inferior has a margin of zero. If the "
                "arms are equal, no number of seeds decides this. Give a margin above 0, or use the rule "
                "superior"
            )
    if not look.questions:
        named = ", ".join(c.id for c in design.configs)
        raise UsageError(
            f"there is no question to decide about {named}: select at least one experiment with frozen Q/K "
            "that has a baseline or a control (`oelm list` shows them), and check --rules"
        )


def decide_study(
    design: Design,
    root: Path | str,
    launcher: Launcher,
    *,
    width: int,
    budget: float = float("inf"),
    guess: Mapping[ArmKey, float] | None = None,
    say: Say = print,
) -> DecideOutcome:
    """Train seeds until no question is open, the budget is spent, or the user stops the launcher.

    width: how many runs the launcher trains at the same time
    budget: maximum training time, in seconds, of all runs and tuning trials of these arms, including those
        that were trained before this call
    guess: expected seconds of one run of each arm, used while no arm has a finished run
    """
    check_settings(design, root)
    failed: set[RunKey] = set()
    skipped: set[Path] = set()  # folders of runs that had ended before they were launched
    jobs: list[Job] = []
    told: dict[QuestionKey, tuple[str, int]] = {}
    while True:
        look = look_at(design, root)
        require_questions(look, design)
        _tell(look, told, say)
        record_progress(look, design, root)
        seconds = run_seconds(design, look.seconds, guess or {})
        left = budget - look.spent_seconds
        batch = next_runs(look.questions, look.seeds, seconds, width=width, most_seconds=left, failed=failed)
        if not batch:
            return DecideOutcome(look, jobs, _why_stopped(look, failed))
        if budget < float("inf") and not look.seconds:
            batch = batch[:width]  # a guessed run time can be far too short: measure it before planning more
        ended = list(launcher.launch(make_jobs(_configs(design, batch), root)))
        if all(job.folder in skipped for job in ended):
            raise OelmError(
                f"the run in {ended[0].folder} has ended, but is not counted, so the questions that need it "
                "stay open; `oelm analyze` says why"
            )
        skipped |= {job.folder for job in ended if job.ended_before and job.state != "failed"}
        jobs += ended
        failed |= {(job.config.arm_key, job.config.seed) for job in ended if job.state == "failed"}
        if any(not job.ended for job in ended):
            return DecideOutcome(look_at(design, root), jobs, "interrupted")


def run_seconds(
    design: Design, measured: Mapping[ArmKey, float], guess: Mapping[ArmKey, float]
) -> dict[ArmKey, float]:
    """Return the expected seconds of one run of every arm.

    This is the first of these that is known: the measured time of the arm, the mean of the measured times of
    the other arms, the guess for the arm.
    """
    mean = sum(measured.values()) / len(measured) if measured else 0.0
    return {key: measured.get(key) or mean or guess.get(key) or 1.0 for key in design.by_arm()}


def exit_code(outcome: DecideOutcome) -> int:
    """Return the exit code of `oelm decide`.

    75 if the command was interrupted, 1 if open questions wait for failed runs, 0 if all questions are
    decided, and otherwise 3.
    """
    if outcome.stopped == "interrupted":
        return 75
    if outcome.stopped == "failed":
        return 1
    return 0 if all(q.decided for q in outcome.questions) else EXIT_UNDECIDED


def _configs(design: Design, batch: Sequence[RunKey]) -> list[RunConfig]:
    configs = design.by_arm()
    return [
        replace(configs[arm], seed=seed, compare=replace(configs[arm].compare, max_seeds=design.max_seeds))
        for arm, seed in batch
    ]


def _why_stopped(look: Look, failed: set[RunKey]) -> str:
    waiting = [set(missing_runs(q, look.seeds)) for q in look.questions if q.is_open]
    if any(runs & failed for runs in waiting):
        return "failed"
    return "budget" if waiting else ""


def _tell(look: Look, told: dict[QuestionKey, tuple[str, int]], say: Say) -> None:
    """Print each question that was closed since the last look, and one line with the counts of all questions.

    told: question -> (state, seeds) that was printed last; updated here
    """
    for q in look.questions:
        now = (q.state, q.n)
        if not q.is_open and told.get(q.key) != now:
            told[q.key] = now
            say(describe(q))
    states = Counter("open" if q.is_open else "decided" if q.decided else q.state for q in look.questions)
    listed = ", ".join(f"{n} {state}" for state, n in states.items())
    asked = counted(len(look.questions), "question")
    say(f"{asked}: {listed}; {duration_text(look.spent_seconds)} of training so far")


def record_progress(look: Look, design: Design, root: Path | str) -> None:
    """Write how many questions of each study are decided, which `oelm monitor` and the progress show."""
    for study in {config.study for config in design.configs}:
        asked = [q for q in look.questions if q.arm.config.study == study]
        decided, still_open = sum(q.decided for q in asked), sum(q.is_open for q in asked)
        write_decide_progress(Path(root) / study, DecideProgress(len(asked), decided, still_open))


def describe(q: Question) -> str:
    """Return one line with a question and its present answer."""
    pair = f"{q.arm.id} against {q.reference.id} ({q.comparison}), {q.rule.name}"
    if q.decided:
        return f"{pair}: {q.state}, stopped at n = {q.n} by the sequential rule; {estimate_text(q)}"
    if q.is_open:
        expected = f"about {q.expected} seeds expected" if q.expected else "no prediction yet"
        return f"{pair}: open at n = {q.n}; {estimate_text(q)}; {expected}"
    return f"{pair}: {q.state} at n = {q.n}: {q.why}"


def estimate_text(q: Question) -> str:
    """Return the estimated difference of a question and its confidence interval, with units."""
    e = q.estimate
    if e is None or e.interval is None:
        return "no interval yet"
    if q.rule.name == "scenario":
        value, (low, high), unit = e.value, e.interval, " points"
    else:
        value, low, high = (100 * math.expm1(x) for x in (e.value, *e.interval))
        unit = " %"
    return f"{value:+.2f}{unit} ({100 * e.level:.1f} % interval {low:+.2f} to {high:+.2f}{unit})"
