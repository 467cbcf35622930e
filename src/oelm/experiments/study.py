"""From what a user asks for to runs with an end: resolve, check fairness, pilot, tune, run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from oelm.errors import OelmError
from oelm.experiments.experiment import DEFAULT_SEED, Experiment, require_folder_name, stand_ins
from oelm.experiments.fairness import Difference, check_arms
from oelm.experiments.launch import Job, prepare
from oelm.experiments.overrides import override_from_words
from oelm.experiments.tuning import TRIAL_SEEDS, Choice, choose, trial_configs, tuned
from oelm.training.config import Config, Scale
from oelm.training.folder import RunFolder


class Launcher(Protocol):
    """Brings runs to their end; the local machine and SLURM are two of them."""

    def launch(self, jobs: Sequence[Job]) -> Sequence[Job]: ...


@dataclass(frozen=True)
class Arm:
    """One experiment at one scale: its runs, and the trials that decide its rate if it is tuned."""

    experiment: Experiment
    runs: list[Config]
    trials: list[Config]


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

    def __post_init__(self) -> None:
        if self.study:
            require_folder_name(self.study, "a study's name (--as)")

    def arms(self) -> list[Arm]:
        return [self._arm(e, scale) for scale in self.scales for e in self.experiments]

    def _arm(self, e: Experiment, scale: Scale) -> Arm:
        tune = e.tuned if self.tune is None else self.tune
        runs = [self.config(e, scale, seed) for seed in dict.fromkeys(self.seeds)]
        grid = self.grid or e.grid(scale)
        trials = trial_configs(runs[0], grid, self.trial_seeds, e.trial_share) if tune else []
        return Arm(e, runs, trials)

    def config(self, e: Experiment, scale: Scale, seed: int) -> Config:
        config = override_from_words(e.at(scale, seed, self.data_dir), self.changes)
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
    pilot: bool = False,
    say: Callable[[str], None] = print,
) -> Result:
    """Run everything asked for. Trials and untuned runs go first, together, then the tuned runs."""
    arms = request.arms()
    result = Result(unequal=unequal_arms(arms))
    for difference in result.unequal:
        say(f"unequal: {difference}")
    for note in dict.fromkeys(note for arm in arms for note in stand_ins(arm.runs[0])):
        say(f"note: {note}")
    if pilot and not _pilot(arms, root, launcher, result, say):
        return result
    first = [config for arm in arms for config in (arm.trials or arm.runs)]
    result.jobs = list(launcher.launch(prepare(first, root)))
    ended = {(job.config.id, job.config.scale): True for job in result.jobs}
    for job in result.jobs:
        ended[job.config.id, job.config.scale] &= job.state in ("finished", "diverged")
    final: list[Config] = []
    for arm in (arm for arm in arms if arm.trials):
        name = arm.experiment.id
        if not ended[name, arm.runs[0].scale]:
            say(f"{name}: its trials have not all ended; the same command goes on with them")
            continue
        try:
            choice = choose(arm.trials, root)
        except OelmError as error:
            result.notes.append(str(error))
            say(str(error))
            continue
        result.choices.append(choice)
        say(f"tuned {choice}")
        final += [tuned(config, choice, arm.trials) for config in arm.runs]
    if final:
        result.jobs += launcher.launch(prepare(final, root))
    return result


def _pilot(
    arms: Sequence[Arm], root: Path | str, launcher: Launcher, result: Result, say: Callable[[str], None]
) -> bool:
    """The first arm and its baseline, one seed each; the rest only when both pass the gate."""
    place = {(arm.experiment.id, arm.runs[0].scale): arm for arm in arms}
    partners = ((place.get((a.experiment.baseline, a.runs[0].scale)), a) for a in arms)
    pair = next(((baseline, arm) for baseline, arm in partners if baseline is not None), None)
    chosen = [(arm.trials or arm.runs)[0] for arm in (pair or arms[:1])]
    say(f"pilot: {' and '.join(c.id for c in chosen)}")
    jobs = launcher.launch(prepare(chosen, root))
    objections = [f"{job.name}: {why}" for job in jobs if (why := gate(job))]
    if objections:
        result.jobs = list(jobs)
        result.notes = [f"the pilot did not pass, the rest was not started: {o}" for o in objections]
        for note in result.notes:
            say(note)
        return False
    say("pilot passed")
    return True


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


def audit_holds(audit: dict[str, object]) -> bool:
    """freeze_audit.json holds one report, or one for the start and one for the end of the run."""
    reports = [audit, *(value for value in audit.values() if isinstance(value, dict))]
    return all(report.get("ok", True) is True for report in reports)
