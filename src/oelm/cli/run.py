"""`oelm run`: train many runs, on this machine or through SLURM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from oelm.cli.cpu_warning import warn_if_slow_on_cpu
from oelm.cli.gpu import GpuName
from oelm.cli.options import (
    Changes,
    Json,
    MachineOptions,
    Runs,
    Seeds,
    Selection,
    require_writable,
)
from oelm.cli.output import print, print_json, print_table
from oelm.cli.progress import RunProgress, counts
from oelm.cli.run_plan import print_plan
from oelm.cli.slurm import SlurmFlags
from oelm.cli.values import SEVERAL, Count, Integer, Integers, Numbers, PositiveCount
from oelm.config.run_config import RunConfig, Scale
from oelm.errors import UsageError
from oelm.experiments.launch.jobs import RETRIES, Events, Launcher, exit_code
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.site import site_file
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.launch.slurm import SlurmLauncher, require_sbatch
from oelm.experiments.pilot import PILOT_FACTOR
from oelm.experiments.request import TRIAL_SEEDS, ArmPlan, Request
from oelm.experiments.study import StudyOutcome, run_study
from oelm.runs.states import EXIT_INTERRUPTED
from oelm.units import counted

Where = Literal["local", "slurm"]
_PILOT = (
    "Run one experiment and its baseline with one seed first. Run the rest only if both finish, their freeze "
    "audits pass and the experiment is within --pilot-factor of the baseline on validation."
)
_RETRY_DIVERGED = (
    "Resume diverged runs from their last checkpoint. Useful only if something has changed, because the same "
    "steps on the same machine diverge again. Diverged tuning trials are not resumed."
)


@Parameter(name="*", group=Group("Tuning", sort_key=1))
@dataclass(frozen=True)
class TuningOptions:
    """Options for tuning the learning rate."""

    tune: Annotated[bool | None, Parameter(negative="--no-tune")] = None
    """Choose each learning rate from a grid by validation loss (default: as `oelm show ID` says)."""
    grid: Numbers = ()
    """Learning rates to try first (default: the grid of the experiment). If the best is at the edge, more
    are tried."""
    trial_seeds: Integers = TRIAL_SEEDS
    """Seeds of the tuning trials, at least two. All learning rates are tried with the first, the better half
    with the others."""


@Parameter(name="*", group=Group("Pilot and retries", sort_key=2))
@dataclass(frozen=True)
class RetryOptions:
    """Options for pilot runs before all others, and for runs that fail."""

    pilot: Annotated[bool, Parameter(help=_PILOT)] = False
    pilot_factor: Annotated[float, Parameter(validator=Number(gt=0))] = PILOT_FACTOR
    """Limit F of --pilot: F times the perplexity, or 1/F of the accuracy, of the baseline; inf = no limit."""
    retries: Count = RETRIES
    """How often a failed run is started again."""
    retry_diverged: Annotated[bool, Parameter(help=_RETRY_DIVERGED)] = False


@Parameter(name="*", group=Group("This machine (--on local)", sort_key=3))
@dataclass(frozen=True)
class LocalOptions:
    """Options for how runs share this machine."""

    gpus: str = "auto"
    """GPUs to use: auto, none, or device numbers such as 0,1."""
    gpus_per_run: PositiveCount = 1
    """GPUs for each run; with --nodes, the GPUs of each node."""
    slots: Integer = 0
    """Runs that train at the same time; 0 = automatic."""


@dataclass(frozen=True)
class Place:
    """Where and how runs are trained: all options that are needed to create a launcher."""

    on: Where
    runs: str
    local: LocalOptions
    slurm: SlurmFlags
    machine: MachineOptions
    retries: int

    def check(self) -> None:
        """Raise UsageError if options contradict each other, or if this machine lacks a device or folder."""
        if self.machine.shard and self.local.gpus_per_run * (self.slurm.nodes or 1) < 2:
            raise UsageError("--shard needs several GPUs per run: add --gpus-per-run 2 or more")
        if self.local.gpus == "none" and self.machine.device.startswith("cuda"):
            raise UsageError(f"--device {self.machine.device} contradicts --gpus none; leave one of them out")
        if self.local.gpus == "none" and self.local.gpus_per_run > 1:
            raise UsageError("--gpus-per-run contradicts --gpus none; leave one of them out")
        if self.on == "local" and (given := self.slurm.given()):
            raise UsageError(
                f"allowed only with --on slurm: {', '.join(given)}; add --on slurm, or leave the options out"
            )
        if self.on == "slurm" and (self.local.slots or self.local.gpus not in ("auto", "none")):
            raise UsageError(
                "--slots and device numbers in --gpus are not allowed with --on slurm; use "
                "--parallel for the number of runs at a time, --gpus-per-run or --gres for the GPUs of a "
                "run, and --gpus none for jobs without GPUs"
            )
        if self.on == "slurm":
            self.slurm.options(0)  # raises UsageError for invalid options
            # Devices are not checked, because the compute nodes may have different devices than this machine.
            require_writable(self.runs, "--runs / OELM_RUNS")
        else:
            self.machine.check(self.runs)

    def check_launch(self, configs: Sequence[RunConfig]) -> None:
        """Raise UsageError if no SLURM job can be submitted; warn if the runs take hours on this CPU."""
        if self.on == "slurm":
            require_sbatch()
        else:
            device = "cpu" if self.local.gpus == "none" else self.machine.device
            warn_if_slow_on_cpu(configs, self.runs, device)

    def launcher(self, count: int, events: Events) -> Launcher:
        """Return a launcher for `count` runs, on this machine or through SLURM."""
        gpus_per_run, machine = self.local.gpus_per_run, self.machine.machine()
        if self.on == "slurm":
            options = self.slurm.options(0 if self.local.gpus == "none" else gpus_per_run)
            wait = not self.slurm.no_wait
            return SlurmLauncher(self.runs, options, machine, wait=wait, retries=self.retries, events=events)
        slots = make_slots(
            count,
            gpus=self.local.gpus,
            gpus_per_run=gpus_per_run,
            slots=self.local.slots,
            threads=machine.threads,
        )
        return LocalLauncher(slots, machine, retries=self.retries, events=events)


def run(
    *ids: str,
    selection: Selection = Selection(),
    scale: Annotated[tuple[Scale, ...], SEVERAL] = ("full",),
    seeds: Seeds = (),
    changes: Changes = Changes(),
    runs: Runs = "runs",
    on: Where = "local",
    dry_run: bool = False,
    gpu: GpuName = "",
    json: Json = False,
    tuning: TuningOptions = TuningOptions(),
    retry: RetryOptions = RetryOptions(),
    local: LocalOptions = LocalOptions(),
    slurm: SlurmFlags = SlurmFlags(),
    machine: MachineOptions = MachineOptions(),
) -> int:
    """Train the chosen experiments with all seeds and print a summary.

    Parameters
    ----------
    ids
        IDs of experiments (`oelm list`), or study files such as my.yaml.
    scale
        Sizes of the runs. full: as in the original study; mini: minutes on a CPU; smoke: seconds.
    on
        Where to train: on this machine, or through SLURM.
    dry_run
        Print the runs that would be started, without starting them.
    """
    if gpu and not dry_run:
        raise UsageError("--gpu works only with --dry-run: add that, or choose GPUs to train on with --gpus")
    place = Place(on, runs, local, slurm, machine, retry.retries)
    place.check()
    request = Request(
        experiments=selection.experiments(ids),
        scales=scale,
        seeds=seeds,
        changes=changes.values(),
        study=changes.study_name,
        **vars(tuning),  # tune, grid and trial_seeds
        data_dir=machine.data_dir,
    )
    arms = request.arms()
    for note in request.left_out() if not json else ():
        print(f"note: {note}")
    _check_flags_are_used(arms, tuning, retry, slurm)
    count = sum(arm.total_runs for arm in arms)
    if on == "slurm" and not json and (profile := site_file()):
        print(f"site profile: {profile}")
    if dry_run:
        print_plan(arms, runs, place.launcher(count, Events()), machine, gpu, json)
        return 0
    planned = [config for arm in arms for config in arm.runs]
    with RunProgress(len(planned), quiet=json) as progress:
        launcher = place.launcher(count, progress.events())
        place.check_launch(planned)
        outcome = run_study(
            arms,
            runs,
            launcher,
            pilot_factor=retry.pilot_factor if retry.pilot else 0.0,
            retry_diverged=retry.retry_diverged,
            say=progress.say,
        )
    if json:
        print_json(_facts(outcome))
    else:
        _print_summary(outcome)
    code = exit_code(outcome.jobs) or (1 if outcome.problems else 0)
    return 0 if code == EXIT_INTERRUPTED and slurm.no_wait else code


def _check_flags_are_used(
    arms: Sequence[ArmPlan], tuning: TuningOptions, retry: RetryOptions, slurm: SlurmFlags
) -> None:
    """Raise UsageError if an option has no effect together with the others."""
    if retry.pilot and slurm.no_wait:
        raise UsageError("--no-wait cannot be combined with --pilot, which waits for the pilot runs")
    if retry.pilot_factor != PILOT_FACTOR and not retry.pilot:
        raise UsageError("--pilot-factor has no effect without --pilot; add --pilot, or leave it out")
    tunes = any(arm.grid for arm in arms)
    seeds = {config.seed for arm in arms if arm.grid for config in arm.runs}
    if both := sorted(seeds & {*tuning.trial_seeds}):
        raise UsageError(
            f"seed {both[0]} is in --seeds and --trial-seeds; a run must not have a seed that chose its "
            "learning rate, so change one of them"
        )
    if (tuning.grid or tuning.trial_seeds != TRIAL_SEEDS) and not tunes:
        raise UsageError("--grid and --trial-seeds have no effect: no experiment is tuned; add --tune")


def _print_summary(outcome: StudyOutcome) -> None:
    print()
    troubled = [job for job in outcome.jobs if job.state not in ("finished", "pending")]
    if troubled:
        print_table(("run", "state", "reason"), [(j.name, j.state, j.reason or "-") for j in troubled])
    print(f"{counted(len(outcome.jobs), 'run')}: {counts(outcome.jobs)}")
    if any(not job.ended for job in outcome.jobs):
        print("the same command resumes the runs that are not finished")


def _facts(outcome: StudyOutcome) -> dict[str, Any]:
    return {
        "runs": [job.to_dict() for job in outcome.jobs],
        "tuned": [choice.to_dict() for choice in outcome.choices],
        "unequal": [u.to_dict() for u in outcome.unequal],
        "problems": outcome.problems,
    }
