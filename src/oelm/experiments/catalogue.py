"""The catalogue of all experiments, by ID. `register_experiment(Experiment(...))` adds one.

Users keep their own experiments in study files (`my.yaml`, see `study_file`) or in Python files. They name
these files with `--catalogue FILE` or with the environment variable OELM_CATALOGUE, where several files are
separated as in PATH. A command that takes IDs takes a study file in their place.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError, unknown_name
from oelm.experiments.experiment import Experiment
from oelm.experiments.scales import SCALES

# The phases into which the original study divides its experiments; "extra" holds our additions.
PHASES: dict[int | str, str] = {
    1: "BERT fine-tuning on XNLI",
    2: "GPT language modelling on TinyStories",
    3: "GPT language modelling: frozen random Q/K, OpenWebText, WikiText-103",
    4: "GPT classification from scratch",
    "paper": "BERT fine-tuning on SST-2 and MNLI",
    "extra": "controls and next steps that the original study does not have",
}
# Phase of a report -> phases whose experiments it shows. The original study's report of phase 3 compares all
# seven GPT runs, two of which belong to phase 2. A phase that is not listed shows only its own experiments.
REPORT_COVERS: dict[int | str, tuple[int | str, ...]] = {3: (2, 3)}

STUDIES = {
    "paper": "the experiments of the original study, with additional controls and next steps",
    "gap": "which trainable extras close the gap of frozen Q/K in language modelling, each with a control",
    "wide": "the headline arms of `gap` at the original study's width, 512 with 6 layers",
    "finetune": "freezing in a pretrained encoder: keep, orthonormalise or replace its Q/K",
    "gpt-cls": "GPT classification from scratch (phase 4) with tuned learning rates",
    "probes": "recall and copy tasks that only attention can solve",
    "demo": "all steps of a study in minutes on two cores (`oelm demo`)",
}

_MODULES = ("paper", "controls", "gap", "wide", "finetune", "gpt_cls", "probes", "demo")

CATALOGUE = "OELM_CATALOGUE"  # environment variable that names the user's catalogue files

_registered: dict[str, Experiment] = {}
_loaded: list[str] = []


def register_experiment(experiment: Experiment) -> Experiment:
    """Add an experiment to the catalogue and return it; raise UsageError if its ID is already taken."""
    _load_catalogue()
    _add(experiment)
    return experiment


def experiments() -> dict[str, Experiment]:
    """Return all experiments by ID, in the order of the catalogue."""
    _load_catalogue()
    return dict(_registered)


def experiment(name: str) -> Experiment:
    """Return the experiment whose ID is `name`, in upper or lower case.

    Raises UsageError for an unknown ID; the message suggests the most similar known ID.
    """
    if is_study_file(name):
        raise UsageError(
            f"this command takes one experiment: name an arm of {name} by its ID (`oelm show {name}`)"
        )
    known = experiments()
    if name in known:
        return known[name]
    for e in known.values():
        if e.id.lower() == name.lower():
            return e
    raise unknown_name("experiment", name, known, see="`oelm list`")


def select(
    ids: Sequence[str] = (), *, phases: Sequence[int | str] = (), study: str = "", everything: bool = False
) -> list[Experiment]:
    """Return the experiments that a command names by their IDs, by study files, by phases or by a study.

    everything: return all experiments of the study `paper` (the option --all)
    """
    known = experiments()
    if study and study not in (studies := _studies_of(known.values())):
        raise unknown_name("study", study, studies)
    wanted = [find_phase(phase) for phase in phases]
    if ids:
        if wanted or study or everything:
            raise UsageError("name experiments either by their IDs or by --phase, --study or --all")
        chosen = (study_arms(name) if is_study_file(name) else [experiment(name)] for name in ids)
        return list({e.id: e for arms in chosen for e in arms}.values())  # without repetitions
    if everything and (study or wanted):
        raise UsageError("--all selects the study `paper`: leave out --phase and --study, or leave out --all")
    if study and wanted and not any(e.phase in wanted for e in known.values() if e.study == study):
        named = ", ".join(map(str, wanted))
        raise UsageError(
            f"the study {study} has no phase {named}: only the study `paper` has phases; leave out --phase"
        )
    if wanted or study or everything:
        of_study = [e for e in known.values() if e.study == (study or "paper")]
        return [e for e in of_study if not wanted or e.phase in wanted]
    raise UsageError("name experiments by their IDs, --phase N, --study NAME or --all (see `oelm list`)")


def is_study_file(name: str) -> bool:
    """Return whether a name on the command line is a study file instead of the ID of an experiment."""
    return name.lower().endswith((".yaml", ".yml"))


def study_arms(path: str) -> list[Experiment]:
    """Return the experiments of a study file, and add them to the catalogue."""
    from oelm.experiments.study_file.load import load_study

    study = load_study(path)
    if study.name in STUDIES:
        raise UsageError(f"{path}: the name '{study.name}' belongs to a built-in study; give yours another")
    known = experiments()
    for e in study.experiments:
        if known.get(e.id) != e:
            _add(e)
    full_path = str(Path(path).expanduser().resolve())
    if study.registers_data and full_path not in _loaded:
        _loaded.append(full_path)
    return list(study.experiments)


def one_experiment(name: str, arm: str = "") -> Experiment:
    """Return the experiment with the ID `name`, or one arm of the study file `name`.

    arm: name or ID of the arm; may be left out if the file has only one arm
    """
    if not is_study_file(name):
        if arm:
            raise UsageError(f"'{arm}': a second name is for study files, as in `oelm train my.yaml {arm}`")
        return experiment(name)
    arms = {e.arm: e for e in study_arms(name)}
    if not arm and len(arms) > 1:
        raise UsageError(f"{name} has several arms; add one of their names: {', '.join(arms)}")
    by_id = {e.id: e for e in arms.values()}
    found = arms.get(arm or next(iter(arms))) or by_id.get(arm)
    if found is None:
        raise unknown_name(f"arm of {name}", arm, arms)
    return found


def find_phase(name: int | str) -> int | str:
    """Return the phase of the original study with this number or name: 3, "3" or "paper"."""
    for phase in PHASES:
        if str(phase) == str(name).lower():
            return phase
    raise UsageError(f"there is no phase {name}. Valid: {', '.join(map(str, PHASES))}")


def planned_configs() -> dict[str, dict[str, RunConfig]]:
    """Return experiment ID -> scale -> the config in the catalogue.

    `oelm.analysis.analyze` compares these configs with those of the runs.
    """
    return {id: {scale: e.planned(scale) for scale in SCALES} for id, e in experiments().items()}


def reported_with(phases: Sequence[int | str]) -> list[str]:
    """Return the IDs of the experiments that the report of these phases covers."""
    wanted = [find_phase(phase) for phase in phases]
    covered = {p for phase in wanted for p in REPORT_COVERS.get(phase, (phase,))}
    return [e.id for e in experiments().values() if e.phase in covered]


def load_catalogue_files(paths: Iterable[str]) -> None:
    """Load the user's catalogue files, so that their experiments are known; a Python file runs only once."""
    for path in paths:
        if is_study_file(path):
            study_arms(path)
        elif path:
            _run_file(str(Path(path).expanduser().resolve()))


def loaded_catalogue_files() -> tuple[str, ...]:
    """Return the files that worker processes must load too, because they may register datasets.

    These are all Python files, and study files with a dataset of the hub.
    """
    return tuple(_loaded)


def catalogue_files() -> list[str]:
    """Return the files that the environment variable OELM_CATALOGUE names."""
    return [path for path in os.environ.get(CATALOGUE, "").split(os.pathsep) if path]


@functools.cache
def _run_file(path: str) -> None:
    if not Path(path).is_file():
        raise UsageError(
            f"the catalogue file {path} does not exist; correct --catalogue or the variable {CATALOGUE}"
        )
    try:
        runpy.run_path(path)
        _loaded.append(path)
    except Exception as error:  # show the line of the user's file instead of a traceback through this package
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f"{path}, line {lines[-1]}" if lines else path
        message = str(error) if isinstance(error, OelmError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"the catalogue file {where}: {message}") from None


def _studies_of(known: Iterable[Experiment]) -> list[str]:
    return list(dict.fromkeys(e.study for e in known))


@functools.cache
def _load_catalogue() -> None:
    for name in _MODULES:
        module = importlib.import_module(f"oelm.experiments.studies.{name}")
        for entry in module.EXPERIMENTS:
            _add(entry)


def _add(entry: Experiment) -> None:
    if entry.id in _registered:
        raise UsageError(f"the experiment '{entry.id}' is already registered; give yours another ID")
    _registered[entry.id] = entry
