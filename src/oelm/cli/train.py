"""`oelm train ID`: one run in this process, resumable by the same command."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from oelm.cli.options import (
    add_catalogue,
    add_changes,
    add_json,
    add_machine,
    add_runs,
    add_scale,
    check_machine,
    command_parser,
    duration,
    load_own,
    machine_from,
)
from oelm.cli.output import print, print_json
from oelm.config.overrides import changes_from_words
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError
from oelm.experiments.catalogue import experiment
from oelm.experiments.experiment import DEFAULT_SEED, stand_ins
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.worker import is_rank_zero, train_folder
from oelm.experiments.study import ArmPlan, Request
from oelm.experiments.tuning import choose_lr, with_chosen_lr
from oelm.runs.folder import RunFolder


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "train",
        "one run in this process; the same command goes on where it stopped",
        "oelm train GPT-02 --scale mini --seed 0 --set budget.steps=600",
    )
    parser.add_argument("id", metavar="ID")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument(
        "--time-limit", default="0", metavar="TIME", help="checkpoint and exit 75 after this (e.g. 3h)"
    )
    add_scale(parser)
    add_changes(parser)
    add_runs(parser)
    add_catalogue(parser)
    add_machine(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    load_own(args)
    check_machine(args)
    machine = machine_from(args, duration(args.time_limit))
    e, changes = experiment(args.id), changes_from_words(args.changes)
    request = Request(
        [e],
        (args.scale,),
        (args.seed,),
        changes,
        args.study_name,
        tune=False if "optim.lr" in changes and e.tuned else None,
        data_dir=args.data_dir,
    )
    (arm,) = request.arms()
    config = _tuned_config(arm, args.runs, quiet=args.json or not is_rank_zero())
    (job,) = make_jobs([config], args.runs)
    if is_rank_zero() and not args.json:
        print(f"{job.name} ({config.scale}) in {job.folder}")
        for note in stand_ins(config):
            print(f"note: {note}")
    code = train_folder(job.folder, machine)
    if is_rank_zero():
        try:
            _tell(RunFolder(job.folder), as_json=args.json)
            sys.stdout.flush()
        except OSError:  # the terminal is gone; the exit code still says how the run ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _tuned_config(arm: ArmPlan, root: str, quiet: bool) -> RunConfig:
    """The config of the arm's only run, with the tuned learning rate if the experiment is tuned."""
    (config,) = arm.runs
    if not arm.trials:
        return config
    try:
        choice = choose_lr(arm.trials, root)
    except OelmError:
        raise OelmError(
            f"{config.id} runs with a learning rate tuned on validation, and its trials have not been run: "
            f"`oelm run {config.id} --scale {config.scale}` does both. To train it with a learning rate of "
            f"your own, add --set optim.lr={config.optim.lr:g}"
        ) from None
    if not quiet:
        print(f"tuned {choice}")
    return with_chosen_lr(config, choice, arm.trials)


def _tell(folder: RunFolder, as_json: bool) -> None:
    status, results = folder.status(), folder.results()
    state = status.state if status else "not started"
    if as_json:
        reason = status.reason if status else ""
        print_json({"folder": str(folder.path), "state": state, "reason": reason, "results": results})
        return
    reason = f": {status.reason}" if status and status.reason else ""
    print(f"{state}{reason}")
    if results:
        for line in _result_lines(folder, results):
            print(line)
    elif state == "interrupted":
        print("  the same command goes on from the last checkpoint")


def _result_lines(folder: RunFolder, results: dict[str, Any]) -> list[str]:
    try:
        metric = results["metric"]
        found = {split: results[split] for split in ("validation", "test") if results.get(split)}
        return [f"  {name} {metric} {of[metric]:.4g}, loss {of['loss']:.4f}" for name, of in found.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise OelmError(
            f"{folder.results_file} does not hold the results of a run ({type(error).__name__}: {error}). "
            "Restore it from a copy, or remove it and give the same command again: the run goes on from its "
            "last checkpoint."
        ) from None
