"""`oelm decide`: train seeds until the questions of a study are answered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from oelm.analysis.statistics.sequential import MAX_SEEDS, MIN_SEEDS, level_per_look
from oelm.cli.gpu import GpuName, gpu_facts, print_gpu_hours
from oelm.cli.options import Changes, Json, MachineOptions, OneScale, Runs, Selection
from oelm.cli.output import print, print_json, print_table
from oelm.cli.progress import RunProgress
from oelm.cli.run import LocalOptions, Place, SlurmFlags, TuningOptions, Where
from oelm.cli.values import SEVERAL, Count, Integer, Seconds
from oelm.errors import UsageError
from oelm.experiments.catalogue import with_references
from oelm.experiments.experiment import stand_ins
from oelm.experiments.launch.jobs import RETRIES, Launcher
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slurm import SlurmLauncher
from oelm.experiments.request import Request
from oelm.units import bytes_text, counted, duration_text

if TYPE_CHECKING:
    from oelm.experiments.decide.forecast import Forecast
    from oelm.experiments.decide.look import Design, Look
    from oelm.experiments.decide.loop import DecideOutcome

RuleName = Literal["target", "scenario", "goal", "sign"]
_RULES: tuple[RuleName, ...] = ("target", "scenario", "goal", "sign")


def decide(
    *ids: str,
    selection: Selection = Selection(),
    scale: OneScale = "full",
    budget: Annotated[Seconds, Parameter(show_default=lambda _: "no limit")] = float("inf"),
    max_seeds: Integer = 20,
    rules: Annotated[tuple[RuleName, ...], SEVERAL] = _RULES,
    changes: Changes = Changes(),
    runs: Runs = "runs",
    on: Where = "local",
    dry_run: bool = False,
    gpu: GpuName = "",
    json: Json = False,
    tuning: TuningOptions = TuningOptions(),
    retries: Count = RETRIES,
    local: LocalOptions = LocalOptions(),
    slurm: SlurmFlags = SlurmFlags(),
    machine: MachineOptions = MachineOptions(),
) -> int:
    """Train seeds until every question is decided or would need too many seeds, or the budget is spent.

    After an interruption, the same command continues. Exit codes: 0 = every question is decided; 3 = at least
    one is not (budget spent, too many seeds needed, or arms that cannot be compared); 1 = runs failed;
    75 = interrupted.

    Parameters
    ----------
    ids
        IDs of experiments (`oelm list`), or study files. Their baselines and controls are added.
    budget
        Limit for the training time of all runs and tuning trials together, such as 6h. Two runs that train
        at the same time count twice.
    max_seeds
        Maximum number of seeds of an arm, from 3 to 50. It sets the confidence level of the
        intervals, which are checked after 3, 4, ... seeds: keep it when you continue a study.
    rules
        Kinds of questions. target: at most 5 % worse than the baseline and the control? goal: at most 1 %
        worse than the control? scenario: 2 or 5 points of accuracy worse? sign: better or worse?
    on
        Where to train: on this machine, or through SLURM.
    dry_run
        Print the questions and what they will probably need, without starting a run.
    retries
        How often a failed run is started again.
    """
    from oelm.experiments.decide import forecast as forecasts
    from oelm.experiments.decide.look import check_settings, look_at
    from oelm.experiments.decide.loop import exit_code, require_questions
    from oelm.experiments.decide.study import make_design, tune_and_decide

    if not MIN_SEEDS <= max_seeds <= MAX_SEEDS:
        raise UsageError(f"--max-seeds must be from {MIN_SEEDS} to {MAX_SEEDS}, not {max_seeds}")
    if gpu and not dry_run:
        raise UsageError("--gpu works only with --dry-run: add that, or choose GPUs to train on with --gpus")
    place = Place(on, runs, local, slurm, machine, retries)
    place.check()
    request = Request(
        experiments=with_references(selection.experiments(ids)),
        scales=(scale,),
        seeds=(0,),
        changes=changes.values(),
        study=changes.study_name,
        **vars(tuning),  # tune, grid and trial_seeds
        data_dir=machine.data_dir,
    )
    arms = request.arms()
    for note in request.left_out() if not json else ():
        print(f"note: {note}")
    if rules != _RULES and any(arm.runs[0].compare.questions for arm in arms):
        raise UsageError(
            "--rules has no effect on the questions of a study file; leave it out, or change the questions "
            "in the file"
        )
    design = make_design(arms, max_seeds, rules)
    check_settings(design, runs)
    look = look_at(design, runs)
    require_questions(look, design)
    if look.runs_before and not json:
        print(
            f"note: {counted(look.runs_before, 'run')} ended before --max-seeds was fixed. The verdicts are "
            f"valid only if you chose --max-seeds {max_seeds} before you saw these results."
        )
    limited = budget < float("inf")
    plans = forecasts.plans_of(design, runs) if dry_run or limited else {}
    if limited:
        forecasts.check_budget(budget, look, plans)
    if dry_run:
        needs = forecasts.forecast(design, look, plans, arms, runs)
        _print_plan(design, look, needs, gpu=gpu, runs=runs, as_json=json)
        return 0
    studies = [Path(runs) / study for study in sorted({config.study for config in design.configs})]
    with RunProgress(0, quiet=json, studies=studies) as progress:
        launcher = place.launcher(len(arms) * max_seeds, progress.events())
        place.check_launch(design.configs)
        outcome = tune_and_decide(
            arms,
            design,
            runs,
            launcher,
            width=_width(launcher),
            budget=budget,
            guess=forecasts.guessed_seconds(plans),
            say=progress.say,
        )
    if json:
        print_json(_facts(outcome))
    else:
        _print_summary(outcome)
    return exit_code(outcome)


def _width(launcher: Launcher) -> int:
    """Return how many runs the launcher trains at the same time."""
    if isinstance(launcher, SlurmLauncher):
        return launcher.options.parallel
    return len(launcher.slots) if isinstance(launcher, LocalLauncher) else 1


def _print_plan(design: Design, look: Look, needs: Forecast, *, gpu: str, runs: str, as_json: bool) -> None:
    """Print the questions and what they need; `gpu` is the GPU whose hours are predicted, "" for none."""
    most = [(config, needs.most_runs_of.get(key, 0)) for key, config in design.by_arm().items()]
    if as_json:
        questions = [q.to_dict() for q in look.questions]
        predicted = {"gpu": gpu_facts(most, gpu, runs)} if gpu else {}
        facts = {"questions": questions, "runs_before": look.runs_before, "needs": needs.to_dict()}
        print_json({**facts, **predicted})
        return
    _print_questions(look)
    print()
    _print_reasons(look)
    for note in dict.fromkeys(note for config in design.configs for note in stand_ins(config)):
        print(f"note: {note}")
    if not any(q.is_open for q in look.questions):
        spent = duration_text(look.spent_seconds)
        print(f"nothing to train: no question is open; {spent} of training so far")
        return
    expected = f", about {needs.expected_runs} expected" if needs.expected_runs is not None else ""
    arms = counted(len(design.configs), "arm")
    trials = counted(needs.trials, "tuning trial")
    print(f"runs: {needs.least_runs} to {needs.most_runs}{expected} ({arms}); {trials}")
    hours = f"{duration_text(needs.least_seconds)} to {duration_text(needs.most_seconds)}"
    likely = f", about {duration_text(needs.expected_seconds)} expected" if needs.expected_seconds else ""
    if needs.trials:
        likely += f", and {duration_text(needs.trial_seconds)} for the tuning trials"
    print(f"training time: {hours}{likely}; {duration_text(look.spent_seconds)} spent so far")
    if needs.disk_bytes is not None:
        size = bytes_text(needs.disk_bytes)
        print(f"disk: at most {size}: the best models of all runs, and the checkpoints of one that trains")
    level = 100 * level_per_look(design.max_seeds)
    print(f"questions are checked at 3 to {design.max_seeds} seeds, each time with a {level:.2f} % interval")
    if gpu:
        print_gpu_hours(most, gpu, runs)
        print("the column runs is the maximum of each arm, without tuning trials")


def _print_questions(look: Look) -> None:
    from oelm.experiments.decide.loop import estimate_text

    rows = []
    for q in look.questions:
        state = "open" if q.is_open else q.state
        expected = str(q.expected) if q.is_open and q.expected else "-"
        shown = estimate_text(q) if q.estimate else "-"
        rows.append((q.arm.id, q.reference.id, q.comparison, q.rule.name, state, q.n, shown, expected))
    header = ("arm", "against", "comparison", "rule", "state", "n", "difference", "expected seeds")
    print_table(header, rows)


def _print_reasons(look: Look) -> None:
    """Print why questions have no verdict."""
    for q in look.questions:
        if q.why:
            print(f"{q.arm.id} against {q.reference.id}, {q.rule.name}: {q.why}")


def _print_summary(outcome: DecideOutcome) -> None:
    print()
    _print_questions(outcome.look)
    print()
    _print_reasons(outcome.look)
    for job in outcome.jobs:
        if job.state == "failed":
            print(f"failed: {job.name}: {job.reason}")
    endings = {
        "budget": "stopped: out of budget, because the next run or tuning trial would exceed it; the same "
        "command with a larger --budget continues",
        "interrupted": "interrupted: the same command continues",
        "failed": "stopped: runs failed; the same command tries them again",
    }
    decided = sum(q.decided for q in outcome.questions)
    print(
        f"{decided} of {counted(len(outcome.questions), 'question')} decided"
        + (f"; {endings[outcome.stopped]}" if outcome.stopped else "")
    )


def _facts(outcome: DecideOutcome) -> dict[str, Any]:
    return {
        "questions": [q.to_dict() for q in outcome.questions],
        "runs_before": outcome.look.runs_before,
        "stopped": outcome.stopped,
        "spent_seconds": outcome.look.spent_seconds,
        "tuned": [choice.to_dict() for choice in outcome.choices],
        "runs": [job.to_dict() for job in outcome.jobs],
    }
