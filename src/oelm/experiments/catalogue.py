"""The catalogue of all experiments, by ID. `register_experiment(Experiment(...))` adds an experiment.

Users keep their own experiments in study files (`my.yaml`, see `study_file`) or in Python files. The option
`--catalogue FILE` or the environment variable OELM_CATALOGUE names these files; in the variable, several
files are separated by os.pathsep, as in PATH. Commands accept a study file in place of experiment IDs.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from oelm.analysis.messages import Message
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError, unknown_name
from oelm.experiments.experiment import Experiment
from oelm.experiments.scales import SCALES

# The phases into which the original study divides its experiments. The phase "extra" is ours: it has the
# experiments that we added.
PHASES: dict[int | str, Message] = {
    1: Message("BERT fine-tuning on XNLI"),
    2: Message("GPT language modelling on TinyStories"),
    3: Message("GPT language modelling: frozen random Q/K, OpenWebText, WikiText-103"),
    4: Message("GPT classification from scratch"),
    "paper": Message("BERT fine-tuning on SST-2 and MNLI"),
    "extra": Message("controls and next steps that the original study does not have"),
}
# Phase -> phases whose experiments its report shows; by default only the phase itself. The original study's
# report of phase 3 compares all seven GPT runs, two of which belong to phase 2.
REPORT_COVERS: dict[int | str, tuple[int | str, ...]] = {3: (2, 3)}

STUDIES = {
    "paper": "the experiments of the original study, with additional controls and next steps",
    "gap": "which added parameters close the gap of frozen Q/K in language modelling, each with a control",
    "wide": "the headline arms of `gap` at the original study's width, 512 with 6 layers",
    "longer": "does the gap of `oelm-plus` to its control grow with four and sixteen times the steps?",
    "finetune": "freezing in a pretrained encoder: keep, orthonormalise or replace its Q/K",
    "gpt-cls": "GPT classification from scratch (phase 4) with tuned learning rates",
    "probes": "recall and copy tasks that only attention can solve",
    "demo": "all steps of a study in minutes on two cores (`oelm demo`)",
}

_MODULES = ("paper", "controls", "gap", "wide", "longer", "finetune", "gpt_cls", "probes", "demo")

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
            f"{name} is a study file, but this command takes the ID of one experiment; "
            f"`oelm show {name}` lists the IDs of its arms"
        )
    known = experiments()
    if name in known:
        return known[name]
    if name in STUDIES:
        raise UsageError(f"{name} is a study, not an experiment; `--study {name}` selects its experiments")
    for e in known.values():
        if e.id.lower() == name.lower():
            return e
    raise unknown_name("experiment", name, known, see="`oelm list`")


def select(
    ids: Sequence[str] = (), *, phases: Sequence[int | str] = (), study: str = "", everything: bool = False
) -> list[Experiment]:
    """Return the experiments that the user selects by ID or study file (`ids`), by phase or by study.

    everything: return all experiments of the study `paper` (the option --all)
    """
    known = experiments()
    if study and study not in (studies := _studies_of(known.values())):
        raise unknown_name("study", study, studies)
    wanted = [find_phase(phase) for phase in phases]
    if ids:
        if wanted or study or everything:
            raise UsageError(
                "experiment IDs cannot be combined with --phase, --study or --all; use one or the other"
            )
        chosen = (study_arms(name) if is_study_file(name) else [experiment(name)] for name in ids)
        return list({e.id: e for arms in chosen for e in arms}.values())  # each experiment once
    if everything and (study or wanted):
        raise UsageError(
            "--all selects the whole study `paper`, so it cannot be combined with --phase or --study"
        )
    if study and wanted and not any(e.phase in wanted for e in known.values() if e.study == study):
        named = ", ".join(map(str, wanted))
        raise UsageError(
            f"the study {study} has no phase {named}; only the study `paper` has phases, so leave out --phase"
        )
    if wanted or study or everything:
        of_study = [e for e in known.values() if e.study == (study or "paper")]
        return [e for e in of_study if not wanted or e.phase in wanted]
    raise UsageError(
        "no experiments selected: give experiment IDs, --phase N, --study NAME or --all (see `oelm list`)"
    )


def is_study_file(name: str) -> bool:
    """Return whether `name` is the path of a study file (ends with .yaml or .yml), not an experiment ID."""
    return name.lower().endswith((".yaml", ".yml"))


def study_arms(path: str) -> list[Experiment]:
    """Return the experiments of the study file `path`, one per arm, and add them to the catalogue."""
    from oelm.experiments.study_file.load import load_study

    study = load_study(path)
    if study.name in STUDIES:
        raise UsageError(
            f"{path}: the study is called '{study.name}', which is the name of a built-in study; "
            "choose a different name"
        )
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
            raise UsageError(
                f"'{arm}' after the experiment ID {name} is not allowed: the name of an arm may follow only "
                f"a study file, as in `oelm train my.yaml {arm}`"
            )
        return experiment(name)
    arms = {e.arm: e for e in study_arms(name)}
    if not arm and len(arms) > 1:
        raise UsageError(
            f"{name} has several arms, but this command takes one; add its name: {', '.join(arms)}"
        )
    by_id = {e.id: e for e in arms.values()}
    found = arms.get(arm or next(iter(arms))) or by_id.get(arm)
    if found is None:
        raise unknown_name(f"arm of {name}", arm, arms)
    return found


def find_phase(name: int | str) -> int | str:
    """Return the key of `PHASES` for a number or name: 3, "3", "paper" or "extra"."""
    for phase in PHASES:
        if str(phase) == str(name).lower():
            return phase
    raise UsageError(f"there is no phase {name}. Valid: {', '.join(map(str, PHASES))}")


def with_references(chosen: Sequence[Experiment]) -> list[Experiment]:
    """Return the chosen experiments, and the baselines, controls and references of their questions."""
    known = experiments()
    found = {e.id: e for e in chosen}
    asking = list(chosen)
    for e in asking:  # grows in the loop: the reference of a question may have questions of its own
        for name in (e.baseline, e.control):
            if name in known:
                found.setdefault(name, known[name])
        for reference in (known[q.reference] for q in e.questions if q.reference in known):
            asking += [] if reference in asking else [reference]
            found.setdefault(reference.id, reference)
    return list(found.values())


def planned_configs() -> dict[str, dict[str, RunConfig]]:
    """Return the config that the catalogue has for each experiment and scale, as {ID: {scale: config}}.

    `oelm.analysis.analyze` compares them with the configs of the runs, to find runs with changed settings.
    """
    return {id: {scale: e.planned(scale) for scale in SCALES} for id, e in experiments().items()}


def reported_with(phases: Sequence[int | str]) -> list[str]:
    """Return the IDs of the experiments that the report of these phases covers."""
    wanted = [find_phase(phase) for phase in phases]
    covered = {p for phase in wanted for p in REPORT_COVERS.get(phase, (phase,))}
    return [e.id for e in experiments().values() if e.phase in covered]


def load_catalogue_files(paths: Iterable[str]) -> None:
    """Add the experiments of the user's catalogue files to the catalogue; a Python file runs only once."""
    for path in paths:
        if is_study_file(path):
            study_arms(path)
        elif path:
            _run_file(str(Path(path).expanduser().resolve()))


def loaded_catalogue_files() -> tuple[str, ...]:
    """Return the loaded catalogue files that may register datasets, so that worker processes load them, too.

    These are all Python files, and the study files that describe a dataset of the Hugging Face Hub.
    """
    return tuple(_loaded)


def catalogue_files() -> list[str]:
    """Return the paths of the catalogue files in the environment variable OELM_CATALOGUE."""
    return [path for path in os.environ.get(CATALOGUE, "").split(os.pathsep) if path]


@functools.cache
def _run_file(path: str) -> None:
    if not Path(path).is_file():
        raise UsageError(
            f"the catalogue file {path} does not exist; "
            f"correct --catalogue or the environment variable {CATALOGUE}"
        )
    try:
        runpy.run_path(path)
        _loaded.append(path)
    except (Exception, SystemExit) as error:  # the user needs the line of this file, not a traceback
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f"{path}, line {lines[-1]}" if lines else path
        message = str(error) if isinstance(error, OelmError) else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            message = "it ends the program with sys.exit(); remove this call"
        raise UsageError(f"error in the catalogue file {where}: {message}") from None


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
        raise UsageError(
            f"the catalogue already has an experiment with the ID '{entry.id}'; choose a different ID"
        )
    _registered[entry.id] = entry
