"""`oelm run`: many runs, on this machine or through SLURM."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from oelm.cli.board import board, counts, say
from oelm.cli.options import (
    add_changes,
    add_json,
    add_machine,
    add_runs,
    add_seeds,
    add_selection,
    check_machine,
    chosen_experiments,
    command_parser,
    duration,
    machine_from,
    require_writable,
)
from oelm.cli.output import print, print_json, print_table
from oelm.cli.values import ListAction, Numbers, WholeNumbers
from oelm.config.overrides import changes_from_words
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError, unknown_name
from oelm.experiments.experiment import model_stand_ins
from oelm.experiments.launch.jobs import RETRIES, Events, Launcher, exit_code
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.launch.slurm import SlurmLauncher, SlurmOptions
from oelm.experiments.pilot import PILOT_FACTOR
from oelm.experiments.scales import SCALES
from oelm.experiments.study import ArmPlan, Request, StudyOutcome, run_study, unequal_settings
from oelm.experiments.tuning import TRIAL_SEEDS
from oelm.runs.folder import EXIT_INTERRUPTED, RunFolder, run_path
from oelm.runs.scan import state_of


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "run",
        "many runs, on this machine or through SLURM; the same command goes on where it stopped",
        "oelm run --phase 2 --seeds 0 1 2 --scale mini\n"
        "  oelm run --all --gpus 0,1 --pilot\n"
        "  oelm run --study gap --on slurm --partition gpu --time 8h --dry-run",
    )
    add_selection(parser)
    add_seeds(parser)
    parser.add_argument(
        "--scale", action=ListAction, nargs="+", default=["full"], metavar="|".join(SCALES),
        help="one or several (default: full)",
    )  # fmt: skip
    add_changes(parser)
    add_runs(parser)
    parser.add_argument("--retries", type=int, default=RETRIES, help="further attempts at a run that fails")
    parser.add_argument(
        "--retry-diverged",
        action="store_true",
        help="go on with runs that diverged, from their last checkpoint: for when something has changed "
        "since, as the same steps on the same machine diverge again (trials of a grid are left as they are)",
    )
    parser.add_argument(
        "--pilot",
        action="store_true",
        help="one arm and its baseline first, one seed; the rest only if both finish, their freeze audits "
        "hold and the arm is not worse on validation than --pilot-factor allows",
    )
    parser.add_argument(
        "--pilot-factor",
        type=float,
        default=PILOT_FACTOR,
        metavar="F",
        help=f"gate of --pilot: perplexity at most F times the baseline's, accuracy at least 1/F of it "
        f"(default {PILOT_FACTOR:g}; inf = any)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would run, start nothing")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument(
        "--tune", action=argparse.BooleanOptionalAction, default=None,
        help="choose every arm's learning rate from the same grid on validation (default: as catalogued)",
    )  # fmt: skip
    tuning.add_argument(
        "--grid", action=Numbers, nargs="+", default=[], metavar="LR", help="learning rates to try"
    )
    tuning.add_argument(
        "--trial-seeds", action=WholeNumbers, nargs="+", default=list(TRIAL_SEEDS), metavar="N"
    )
    local = parser.add_argument_group("this machine (--on local)")
    parser.add_argument("--on", default="local", metavar="local|slurm", help="where (default: local)")
    local.add_argument("--gpus", default="auto", help="auto, none, or devices such as 0,1: one run on each")
    local.add_argument("--gpus-per-run", type=int, default=1, metavar="N", help="GPUs of one run (torchrun)")
    local.add_argument("--slots", type=int, default=0, metavar="N", help="runs at a time (0 = automatic)")
    add_slurm(parser)
    add_machine(parser)
    add_json(parser)


def add_slurm(parser: argparse.ArgumentParser) -> None:
    slurm = parser.add_argument_group("SLURM (--on slurm)")
    flags = [
        slurm.add_argument("--partition", default=""),
        slurm.add_argument("--account", default=""),
        slurm.add_argument("--qos", default=""),
        slurm.add_argument("--gres", default="", help="e.g. gpu:a100:1 (default: gpu:<--gpus-per-run>)"),
        slurm.add_argument("--constraint", default=""),
        slurm.add_argument(
            "--time", default="24h", metavar="TIME", help="limit of one job; runs go on in the next"
        ),
        slurm.add_argument("--cpus", type=int, default=4, metavar="N", help="cores of one run"),
        slurm.add_argument(
            "--memory", type=float, default=0, metavar="GB", help="memory of one run (0 = default)"
        ),
        slurm.add_argument("--parallel", type=int, default=64, metavar="N", help="array tasks at a time"),
        slurm.add_argument("--no-wait", action="store_true", help="return after submitting"),
    ]
    parser.set_defaults(slurm_flags=flags)


def _refuse_unused_flags(args: argparse.Namespace, arms: Sequence[ArmPlan]) -> None:
    """Raise UsageError for flags that would have no effect on these runs."""
    given = [f.option_strings[0] for f in args.slurm_flags if getattr(args, f.dest) != f.default]
    if args.on == "local" and given:
        raise UsageError(f"{', '.join(given)}: for a queue only; without --on slurm runs start right here")
    if args.on == "slurm" and (args.slots or args.gpus not in ("auto", "none")):
        raise UsageError(
            "--slots and device numbers are for this machine; for --on slurm say --parallel, and "
            "--gpus-per-run or --gres (--gpus none for jobs without any)"
        )
    if args.pilot and args.no_wait:
        raise UsageError("--pilot decides when its runs have ended, and --no-wait would not wait for them")
    if args.pilot_factor != PILOT_FACTOR and not args.pilot:
        raise UsageError("--pilot-factor is the gate of --pilot, which is not asked for")
    tunes = any(arm.trials for arm in arms)
    if (args.grid or tuple(args.trial_seeds) != TRIAL_SEEDS) and not tunes:
        raise UsageError("--grid and --trial-seeds are for tuning, and nothing here is tuned: add --tune")


def _refuse_impossible(args: argparse.Namespace) -> None:
    for scale in args.scale:
        if scale not in SCALES:
            raise unknown_name("scale", scale, SCALES)
    if args.on not in ("local", "slurm"):
        raise unknown_name("place to run on", args.on, ("local", "slurm"))
    if args.shard and args.gpus_per_run < 2:
        raise UsageError("--shard divides a run between GPUs: add --gpus-per-run with 2 or more")
    least = {"retries": 0, "memory": 0, "cpus": 1, "parallel": 1, "gpus_per_run": 1}
    for name, value in least.items():
        if getattr(args, name) < value:
            raise UsageError(f"--{name.replace('_', '-')} is {value} or more, not {getattr(args, name):g}")
    if not args.pilot_factor > 0:
        raise UsageError(f"--pilot-factor is a number above 0, not {args.pilot_factor:g}")
    if duration(args.time) < 60:
        raise UsageError(f"--time is at least a minute, SLURM's unit, not '{args.time}'")


def run(args: argparse.Namespace) -> int:
    _refuse_impossible(args)
    if args.on == "slurm":
        require_writable(args.runs, "--runs / OELM_RUNS")  # devices and caches are the compute nodes'
    else:
        check_machine(args)
    request = Request(
        experiments=chosen_experiments(args),
        scales=args.scale,
        seeds=args.seeds,
        changes=changes_from_words(args.changes),
        study=args.study_name,
        tune=args.tune,
        grid=args.grid,
        trial_seeds=args.trial_seeds,
        data_dir=args.data_dir,
    )
    arms = request.arms()
    _refuse_unused_flags(args, arms)
    if args.dry_run:
        return _dry_run(args, arms, _launcher(args, arms, Events()))
    with board(quiet=args.json) as events:
        outcome = run_study(
            arms,
            args.runs,
            _launcher(args, arms, events),
            pilot_factor=args.pilot_factor if args.pilot else 0.0,
            retry_diverged=args.retry_diverged,
            say=_say_on_stderr if args.json else say,
        )
    if args.json:
        print_json(_facts(outcome))
    else:
        _summary(outcome)
    code = exit_code(outcome.jobs) or (1 if outcome.problems else 0)
    return 0 if code == EXIT_INTERRUPTED and args.no_wait else code


def _launcher(args: argparse.Namespace, arms: Sequence[ArmPlan], events: Events) -> Launcher:
    if args.on == "slurm":
        options = SlurmOptions(
            partition=args.partition,
            account=args.account,
            qos=args.qos,
            gres=args.gres,
            constraint=args.constraint,
            time_limit=duration(args.time),
            cpus=args.cpus,
            memory_gb=args.memory,
            gpus_per_run=0 if args.gpus == "none" else args.gpus_per_run,
            parallel=args.parallel,
        )
        return SlurmLauncher(
            args.runs,
            options,
            machine_from(args),
            wait=not args.no_wait,
            retries=args.retries,
            events=events,
        )
    count = sum(arm.total_runs for arm in arms)
    slots = make_slots(
        count, gpus=args.gpus, gpus_per_run=args.gpus_per_run, slots=args.slots, threads=args.threads
    )
    return LocalLauncher(slots, machine_from(args), retries=args.retries, events=events)


def _dry_run(args: argparse.Namespace, arms: Sequence[ArmPlan], launcher: Launcher) -> int:
    configs = [config for arm in arms for config in (*arm.trials, *arm.runs)]
    tuned = {arm.experiment.id for arm in arms if arm.trials}
    plan = [_planned(args.runs, config, config.id in tuned) for config in configs]
    unequal = unequal_settings(arms)
    script = _script(launcher, sum(row["state"] != "finished" for row in plan))
    origins, device = _origins(configs, args.data_dir), _device(args.device, launcher)
    if args.json:
        facts = {"runs": plan, "unequal": [u.to_dict() for u in unequal], "device": device, "data": origins}
        print_json({**facts, **({"script": script} if script else {})})
        return 0
    print(f"device: {device}")
    for name, origin in origins.items():
        print(f"data: {name} from {origin}")
    for note in dict.fromkeys(note for arm in arms for note in model_stand_ins(arm.runs[0])):
        print(f"note: {note}")
    for setting in unequal:
        print(f"unequal: {setting}")
    for row in plan:
        rate = f"{row['lr']:g}" if row["lr"] else "tuned"
        state = f" ({row['state']})" if row["state"] else ""
        print(f"{'trial' if row['trial'] else 'run  '}  lr {rate:8} {row['folder']}{state}")
    states = Counter(row["state"] for row in plan if row["state"])
    there = f" ({', '.join(f'{n} {state}' for state, n in states.items())})" if states else ""
    if isinstance(launcher, LocalLauncher):
        names = ", ".join(slot.name for slot in launcher.slots)
        print(f"{len(plan)} runs{there} in {len(launcher.slots)} slots: {names}")
        return 0
    after = ", the tuned ones in a second array when their trials have ended" if tuned else ""
    print(f"{len(plan)} runs{there} as tasks of an array{after}:\n\n{script}", end="")
    return 0


def _origins(configs: Sequence[RunConfig], data_dir: str) -> dict[str, str]:
    """Dataset -> where its text will come from. One name may come from several places at several scales."""
    from oelm.data.sources.open import describe_source  # numpy

    found: dict[str, list[str]] = {}
    for data in dict.fromkeys(config.data for config in configs):
        places = found.setdefault(data.dataset, [])
        origin = describe_source(data.dataset, data.source, data_dir)
        places.extend([origin] if origin not in places else [])
    return {name: " and ".join(places) for name, places in found.items()}


def _device(wish: str, launcher: Launcher) -> str:
    """What the runs will train on."""
    if not isinstance(launcher, LocalLauncher):
        return "chosen by the job on its node"
    if wish != "auto":
        return wish
    return "cuda" if launcher.slots[0].name.startswith("gpu") else "cpu"


def _planned(root: str, config: RunConfig, tuned: bool) -> dict[str, Any]:
    folder, trial = run_path(root, config), config.tune.trial
    state = state_of(folder)[0] if RunFolder(folder).exists() else ""
    rate = None if tuned and not trial else config.optim.lr
    return {"id": config.id, "scale": config.scale, "seed": config.seed, "trial": trial} | {
        "lr": rate, "state": state, "folder": str(folder)
    }  # fmt: skip


def _script(launcher: Launcher, count: int) -> str:
    """What sbatch would be given, when it is a queue that runs are sent to."""
    return launcher.script(max(1, count)) if isinstance(launcher, SlurmLauncher) else ""


def _say_on_stderr(text: str) -> None:
    """Print a message to stderr, because with --json stdout has only JSON."""
    print(text, file=sys.stderr, flush=True)


def _summary(outcome: StudyOutcome) -> None:
    print()
    troubled = [job for job in outcome.jobs if job.state not in ("finished", "pending")]
    if troubled:
        print_table(("run", "state", "reason"), [(j.name, j.state, j.reason or "-") for j in troubled])
    print(f"{len(outcome.jobs)} runs: {counts(outcome.jobs)}")
    if any(not job.ended for job in outcome.jobs):
        print("the same command goes on with what is not finished")


def _facts(outcome: StudyOutcome) -> dict[str, Any]:
    return {
        "runs": [
            {"id": j.config.id, "seed": j.config.seed, "scale": j.config.scale, "trial": j.config.tune.trial}
            | {"state": j.state, "reason": j.reason, "folder": str(j.folder)}
            for j in outcome.jobs
        ],
        "tuned": [
            {"id": c.id, "lr": c.lr, "losses": c.losses, "at_edge": c.at_edge} for c in outcome.choices
        ],
        "unequal": [u.to_dict() for u in outcome.unequal],
        "problems": outcome.problems,
    }
