"""From what a user asks for to runs with an end: resolve, check fairness, pilot, tune, run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from oelm.config.limits import check_config
from oelm.config.overrides import changes_from_words
from oelm.config.run_config import RunConfig, Scale
from oelm.errors import OelmError, UsageError
from oelm.experiments.experiment import DEFAULT_SEED, Experiment, require_folder_name, stand_ins
from oelm.experiments.fairness import Difference, check_arms
from oelm.experiments.launch.local import Job, prepare
from oelm.experiments.tuning import TRIAL_SEEDS, Choice, choose, trial_configs, tuned
from oelm.runs.folder import RunFolder, audit_holds

PILOT_FACTOR = (
    1.5  # the study's own losses are 1.1 to 1.16: a pilot looks for what is broken, not for a verdict
)


class Launcher(Protocol):
    """Brings runs to their end; the local machine and SLURM are two of them."""

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]: ...


@dataclass(frozen=True)
class Arm:
    """One experiment at one scale: its runs, and the trials that decide its rate if it is tuned."""

    experiment: Experiment
    runs: list[RunConfig]
    trials: list[RunConfig]


@dataclass(frozen=True)
class Request:
    """What `oelm run` was asked for."""

    experiments: Sequence[Experiment]
    scales: Sequence[Scale] = ("full",)
    seeds: Sequence[int] = (DEFAULT_SEED,)
    changes: Sequence[str] = ()  # field=value words
    study: str = ""  # file the runs under this name; "" = the experiment's study
    tune: bool | None = None  # None = as the catalogue says
    grid: tuple[float, ...] = ()  # () = the experiment's
    trial_seeds: tuple[int, ...] = TRIAL_SEEDS
    data_dir: str = ""
    again: bool = False  # go on with runs that diverged

    def __post_init__(self) -> None:
        if self.study:
            require_folder_name(self.study, "a study's name (--as)")
        if self.data_dir and set(self.scales) == {"smoke"} and not self.changes:
            raise UsageError(
                "--data-dir changes nothing at smoke scale, where all text is built in; leave it out"
            )

    def arms(self) -> list[Arm]:
        return [self._arm(e, scale) for scale in dict.fromkeys(self.scales) for e in self.experiments]

    def _arm(self, e: Experiment, scale: Scale) -> Arm:
        tune = e.tuned if self.tune is None else self.tune
        runs = [self.config(e, scale, seed) for seed in dict.fromkeys(self.seeds)]
        if not tune:
            return Arm(e, runs, [])
        if any(word.partition("=")[0].strip() == "optim.lr" for word in self.changes):
            raise UsageError(
                f"{e.id}: its rate is chosen by tuning, so optim.lr cannot be set; "
                "say --no-tune to run with that rate, or --grid for the rates to try"
            )
        grid, seeds = dict.fromkeys(self.grid or e.grid(scale)), dict.fromkeys(self.trial_seeds)
        return Arm(e, runs, trial_configs(runs[0], tuple(grid), tuple(seeds), e.trial_share))

    def config(self, e: Experiment, scale: Scale, seed: int) -> RunConfig:
        """One run's config, refused when it cannot be run: before it has a folder or a place in a queue."""
        try:
            config = e.at(scale, seed, self.data_dir, changes_from_words(self.changes))
            check_config(config, self.data_dir)
        except UsageError as error:
            raise UsageError(f"{e.id}: {error}") from None
        return replace(config, study=self.study or self._study(e))

    def _study(self, e: Experiment) -> str:
        """Tuned and untuned runs of one experiment are different runs and never share a folder."""
        if self.tune is None or self.tune == e.tuned:
            return e.study
        return f"{e.study}-{'tuned' if self.tune else 'untuned'}"


@dataclass
class Result:
    """How a request ended."""

    jobs: list[Job] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    unequal: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def unequal_arms(arms: Sequence[Arm]) -> list[Difference]:
    """What differs besides the method. A rate still to be tuned counts as tuned by its grid."""
    configs = [
        replace(a.runs[0], tune=replace(a.trials[0].tune, trial=False)) if a.trials else a.runs[0]
        for a in arms
    ]
    return check_arms(configs, [a.experiment.id for a in arms if a.experiment.published])


def carry_out(
    request: Request,
    root: Path | str,
    launcher: Launcher,
    *,
    pilot: float = 0.0,
    say: Callable[[str], None] = print,
) -> Result:
    """Run everything asked for; with `pilot` (the factor of its gate) one pair first."""
    arms = request.arms()
    result = Result(unequal=unequal_arms(arms))
    for difference in result.unequal:
        say(f"unequal: {difference}")
    for note in dict.fromkeys(note for arm in arms for note in stand_ins(arm.runs[0])):
        say(f"note: {note}")
    work = _Work(root, launcher, request.again, say)
    if pilot:
        pair = pilot_arms(arms)
        say(f"pilot: {' and '.join(arm.experiment.id for arm in pair)}")
        tried = work.bring_to_end(pair)
        objections = pilot_objections(pair, tried, pilot, say)
        if objections:
            tried.unequal = result.unequal
            tried.notes = [f"the pilot did not pass, the rest was not started: {o}" for o in objections]
            for note in tried.notes:
                say(note)
            return tried
    done = work.bring_to_end(arms)
    done.unequal = result.unequal
    return done


@dataclass(frozen=True)
class _Work:
    """Where and how arms are run."""

    root: Path | str
    launcher: Launcher
    again: bool
    say: Callable[[str], None]

    def bring_to_end(self, arms: Sequence[Arm]) -> Result:
        """Trials and untuned runs go first, together, then the tuned runs."""
        first = [config for arm in arms for config in (arm.trials or arm.runs)]
        result = Result(jobs=self._launch(first))
        ended = {(job.config.id, job.config.scale): True for job in result.jobs}
        for job in result.jobs:
            ended[job.config.id, job.config.scale] &= job.state in ("finished", "diverged")
        final: list[RunConfig] = []
        for arm in (arm for arm in arms if arm.trials):
            name = arm.experiment.id
            if not ended[name, arm.runs[0].scale]:
                self.say(f"{name}: its trials have not all ended; the same command goes on with them")
                continue
            try:
                choice = choose(arm.trials, self.root)
            except OelmError as error:
                result.notes.append(str(error))
                self.say(str(error))
                continue
            result.choices.append(choice)
            self.say(f"tuned {choice}")
            final += [tuned(config, choice, arm.trials) for config in arm.runs]
        if final:
            result.jobs += self._launch(final)
        return result

    def _launch(self, configs: Sequence[RunConfig]) -> list[Job]:
        return list(self.launcher.launch(prepare(configs, self.root, again=self.again)))


def pilot_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The first arm whose baseline is asked for too, and that baseline, one seed each."""
    place = {(arm.experiment.id, arm.runs[0].scale): arm for arm in arms}
    partners = ((place.get((a.experiment.baseline, a.runs[0].scale)), a) for a in arms)
    pair = next(([baseline, arm] for baseline, arm in partners if baseline is not None), list(arms[:1]))
    return [replace(arm, runs=arm.runs[:1]) for arm in pair]


def pilot_objections(
    pair: Sequence[Arm], tried: Result, factor: float, say: Callable[[str], None]
) -> list[str]:
    """Why the rest should not start: a run without an end, an audit that fails, an arm that is far worse."""
    order = [arm.experiment.id for arm in pair]  # the tuned of the two has run last
    runs = [job for job in tried.jobs if not job.config.tune.trial]
    runs.sort(key=lambda job: order.index(job.config.id))
    found = [f"{job.name}: {why}" for job in runs if (why := gate(job))] + tried.notes
    if len(runs) < len(pair):
        found += [f"{job.name}: {job.state} {job.reason}".strip() for job in tried.jobs if not job.ended]
        found = found or ["its trials have not all ended"]
    if found:
        return found
    if len(pair) < 2:
        say("pilot passed; without its baseline among the runs, its quality is not judged")
        return []
    (name, worse), text = _compared(*runs), f"(the gate is {factor:g}, --pilot-factor)"
    if not worse <= factor:
        return [f"{name} {text}"]
    say(f"pilot passed: {name} {text}")
    return []


def _compared(baseline: Job, arm: Job) -> tuple[str, float]:
    """How many times worse the arm is on validation: its perplexity, or the inverse of its accuracy, over
    the baseline's."""
    found = [RunFolder(job.folder).results() or {} for job in (baseline, arm)]
    metric = found[0]["metric"]
    reference, value = (float(results["validation"][metric]) for results in found)
    better, worse = (value, reference) if metric == "accuracy" else (reference, value)
    ratio = worse / better if better else (1.0 if worse == better else math.inf)
    text = f"{arm.config.id} has validation {metric} {value:.4g}, {baseline.config.id} {reference:.4g}"
    return f"{text}, a factor of {ratio:.3g}", ratio


def gate(job: Job) -> str:
    """Why a pilot run should stop the rest; "" when it should not."""
    if job.state != "finished":
        return f"{job.state} {job.reason}".strip()
    folder = RunFolder(job.folder)
    results, audit = folder.results() or {}, folder.freeze_audit() or {}
    loss = (results.get("validation") or {}).get("loss")
    if loss is None or not math.isfinite(loss):
        return "no finite validation loss"
    if not audit_holds(audit):
        return f"the freeze audit does not hold (see {folder.audit_file})"
    return ""
