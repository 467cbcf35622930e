"""Every experiment by its ID. A new one is one `register_experiment(Experiment(...))`.

A user's own file of them is read with `--catalogue FILE.py` or OELM_CATALOGUE (several as in PATH).
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

# The phases as the original study counts them; "extra" is ours.
PHASES: dict[int | str, str] = {
    1: "BERT fine-tuning on XNLI",
    2: "GPT language modelling on TinyStories",
    3: "GPT language modelling: frozen random Q/K, OpenWebText, WikiText-103",
    4: "GPT classification from scratch",
    "paper": "BERT fine-tuning on SST-2 and MNLI",
    "extra": "controls the original study lacks, and its named next steps",
}
# The report of a phase may cover runs of another one: that of phase 3 compares all seven GPT runs.
REPORT_COVERS: dict[int | str, tuple[int | str, ...]] = {3: (2, 3)}

STUDIES = {
    "paper": "the study's own experiments, the controls it lacks and its next steps",
    "gap": "does anything close the gap of frozen Q/K in language modelling? each arm with a trained control",
    "finetune": "freezing in a pretrained encoder: keep, orthonormalise or throw away its Q/K",
    "gpt-cls": "phase 4's question with tuned and warmed-up arms",
    "probes": "why: recall and copy tasks that only attention can solve",
    "demo": "the whole story in minutes on two cores (`oelm demo`)",
}

_HOMES = ("paper", "controls", "gap", "finetune", "gpt_cls", "probes", "demo")

CATALOGUE = "OELM_CATALOGUE"  # environment: files of a user's own, as in PATH

_registered: dict[str, Experiment] = {}
_loaded: list[str] = []


def register_experiment(experiment: Experiment) -> Experiment:
    """Add an experiment to the catalogue; its ID must be new."""
    _load_own()
    _add(experiment)
    return experiment


def experiments() -> dict[str, Experiment]:
    """ID -> experiment, in the order of the catalogue."""
    _load_own()
    return dict(_registered)


def experiment(name: str) -> Experiment:
    """By ID, in any case; an unknown one names the nearest."""
    known = experiments()
    if name in known:
        return known[name]
    same = [e for e in known.values() if e.id.lower() == name.lower()]
    if same:
        return same[0]
    error = unknown_name("experiment", name, known)
    raise UsageError(str(error).partition(" Valid: ")[0] + " (`oelm list` shows all)")


def select(
    ids: Sequence[str] = (), *, phases: Sequence[int | str] = (), study: str = "", everything: bool = False
) -> list[Experiment]:
    """What a command line names: IDs, phases of the original study, a study, or all of the study `paper`."""
    known = experiments()
    if study and study not in (studies := _studies_of(known.values())):
        raise unknown_name("study", study, studies)
    wanted = [find_phase(phase) for phase in phases]
    if ids:
        if wanted or study or everything:
            raise UsageError("name experiments by their IDs, or by --phase, --study or --all, not both")
        return list({(e := experiment(name)).id: e for name in ids}.values())  # each once
    if everything and (study or wanted):
        raise UsageError("--all is all of the study `paper`: leave out --phase and --study, or --all")
    if study and wanted and not any(e.phase in wanted for e in known.values() if e.study == study):
        named = ", ".join(map(str, wanted))
        raise UsageError(f"the study {study} has no phase {named}: phases belong to the study paper")
    if wanted or study or everything:
        of_study = [e for e in known.values() if e.study == (study or "paper")]
        return [e for e in of_study if not wanted or e.phase in wanted]
    raise UsageError("name what to run: IDs, --phase N, --study NAME or --all (`oelm list` shows them)")


def find_phase(name: int | str) -> int | str:
    """A phase by its number or name: 3, "3" or "paper"."""
    for phase in PHASES:
        if str(phase) == str(name).lower():
            return phase
    raise UsageError(f"there is no phase {name}. Valid: {', '.join(map(str, PHASES))}")


def planned_configs() -> dict[str, dict[str, RunConfig]]:
    """Experiment ID -> scale -> the config as catalogued, for `oelm.analysis.analyze`."""
    return {id: {scale: e.planned(scale) for scale in SCALES} for id, e in experiments().items()}


def reported_with(phases: Sequence[int | str]) -> list[str]:
    """IDs that the report of these phases covers."""
    wanted = [find_phase(phase) for phase in phases]
    covered = {p for phase in wanted for p in REPORT_COVERS.get(phase, (phase,))}
    return [e.id for e in experiments().values() if e.phase in covered]


def load_catalogue_files(paths: Iterable[str]) -> None:
    """Run the users' own catalogue files, once each."""
    for path in paths:
        if path:
            _run_file(str(Path(path).expanduser().resolve()))


def for_workers() -> dict[str, str]:
    """Environment of a worker: it has to know the datasets that the files loaded here have registered."""
    return {CATALOGUE: os.pathsep.join(_loaded)} if _loaded else {}


def catalogue_files() -> list[str]:
    return [p for p in os.environ.get(CATALOGUE, "").split(os.pathsep) if p]


@functools.cache
def _run_file(path: str) -> None:
    if not Path(path).is_file():
        raise UsageError(f"catalogue file {path} does not exist")
    try:
        runpy.run_path(path)
        _loaded.append(path)
    except Exception as error:  # a user's file may do anything; its author wants the line, not our stack
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f"{path}, line {lines[-1]}" if lines else path
        said = str(error) if isinstance(error, OelmError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{where}: {said}") from None


def _studies_of(known: Iterable[Experiment]) -> list[str]:
    return list(dict.fromkeys(e.study for e in known))


@functools.cache
def _load_own() -> None:
    for home in _HOMES:
        module = importlib.import_module(f"oelm.experiments.studies.{home}")
        for entry in module.EXPERIMENTS:
            _add(entry)


def _add(entry: Experiment) -> None:
    if entry.id in _registered:
        raise UsageError(f"the experiment '{entry.id}' is registered already; give yours another ID")
    _registered[entry.id] = entry
