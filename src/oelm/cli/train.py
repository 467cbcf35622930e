"""`oelm train ID`: train one run in this process, or resume it if it was interrupted."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Literal

from oelm.cli.cpu_warning import warn_if_slow_on_cpu
from oelm.cli.options import (
    ArmName,
    Catalogue,
    Changes,
    IdOrFile,
    Json,
    MachineOptions,
    OneScale,
    Runs,
    Seed,
    load_catalogues,
)
from oelm.cli.output import print, print_json
from oelm.cli.values import Seconds
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import one_experiment
from oelm.experiments.experiment import stand_ins
from oelm.experiments.launch.jobs import make_jobs
from oelm.experiments.launch.worker import is_rank_zero, train_folder
from oelm.experiments.request import ArmPlan, Request
from oelm.experiments.tuning import TuningGroup
from oelm.runs.folder import RunFolder
from oelm.runs.schema import Results, to_json


def train(
    id: IdOrFile,
    arm: ArmName = "",
    /,
    *,
    scale: OneScale = "full",
    seed: Seed = None,
    time_limit: Seconds = 0.0,
    changes: Changes = Changes(),
    runs: Runs = "runs",
    catalogue: Catalogue = (),
    machine: MachineOptions = MachineOptions(),
    json: Json = False,
) -> int:
    """Train one run and print its results.

    Parameters
    ----------
    time_limit
        Save a checkpoint and exit with code 75 after this time, e.g. 3h.
    """
    load_catalogues(catalogue)
    machine.check(runs)
    if machine.shard and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UsageError("--shard needs several processes, but this run has only one: leave out --shard")
    e, changed = one_experiment(id, arm), changes.values()
    request = Request(
        [e],
        (scale,),
        e.seeds[:1] if seed is None else (seed,),
        changed,
        changes.study_name,
        tune=False if "optim.lr" in changed and e.tuned else None,
        data_dir=machine.data_dir,
    )
    (plan,) = request.arms()
    config = _tuned_config(plan, runs, quiet=json or not is_rank_zero())
    (job,) = make_jobs([config], runs)
    if is_rank_zero() and not json:
        print(f"{job.name} in {job.folder}", flush=True)
        for note in stand_ins(config):
            print(f"note: {note}")
    if is_rank_zero():
        warn_if_slow_on_cpu([config], runs, machine.device)
    # Without a terminal, plain lines are printed; with --json, stdout must contain only JSON.
    has_bar = sys.stderr.isatty() and (json or sys.stdout.isatty())
    echo: Literal["", "stdout", "stderr"] = "" if has_bar else "stderr" if json else "stdout"
    code = train_folder(job.folder, replace(machine.machine(time_limit), echo=echo))
    if is_rank_zero():
        try:
            _print_outcome(RunFolder(job.folder), json)
            sys.stdout.flush()
        except OSError:  # the terminal was closed, so only the exit code can report how the run ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _tuned_config(arm: ArmPlan, root: str, quiet: bool) -> RunConfig:
    """Return the config of the only run of `arm`; if the arm is tuned, with the chosen learning rate."""
    (config,) = arm.runs
    if not arm.grid:
        return config
    group = TuningGroup([arm], root, lambda _: None)
    try:
        while group.grow():
            pass
        choice = group.choose(arm)
    except OelmError:
        raise OelmError(
            f"{config.id} needs a tuned learning rate, but its tuning trials have not all ended: "
            f"`oelm run {config.id} --scale {config.scale}` runs the trials and then the experiment. To "
            f"train with a learning rate of your own, add for example --set optim.lr={config.optim.lr:g}"
        ) from None
    if not quiet:
        print(f"tuned {choice}")
    return group.with_lr(arm, choice.lr).runs[0]


def _print_outcome(folder: RunFolder, as_json: bool) -> None:
    status, results = folder.status(), folder.results()
    state = status.state if status else "not started"
    reason = status.reason if status else ""
    if as_json:
        found = to_json(results) if results else None
        print_json({"folder": str(folder.path), "state": state, "reason": reason, "results": found})
        return
    print(f"{state}: {reason}" if reason else state)
    if results:
        for line in _result_lines(results):
            print(line)
    elif state == "interrupted":
        print("  the same command resumes the run from its last checkpoint")


def _result_lines(results: Results) -> list[str]:
    found = [(name, scores) for name in ("validation", "test") if (scores := getattr(results, name))]
    return [
        f"  {name} {results.metric} {getattr(scores, results.metric):.4g}, loss {scores.loss:.4f}"
        for name, scores in found
    ]
