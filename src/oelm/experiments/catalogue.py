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

from oelm.errors import OelmError, UsageError, unknown_name
from oelm.experiments.experiment import Experiment

# What a phase is. The study numbers only its fourth; the others follow the order of its tables.
PHASES = {
    1: "BERT fine-tuning",
    2: "GPT language modelling: TinyStories and OpenWebText",
    3: "GPT language modelling: WikiText-103",
    4: "GPT classification from scratch",
    5: "controls the study lacks, and its named next steps",
}

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
    ids: Sequence[str] = (), *, phase: int | None = None, study: str = "", everything: bool = False
) -> list[Experiment]:
    """What a command line names: IDs, a phase of the paper's study, a study, or all of the paper's."""
    known = experiments()
    if study and study not in (studies := _studies_of(known.values())):
        raise unknown_name("study", study, studies)
    if phase is not None and phase not in (phases := sorted({e.phase for e in known.values() if e.phase})):
        raise UsageError(f"there is no phase {phase}. Valid: {', '.join(map(str, phases))}")
    if ids:
        if phase is not None or study or everything:
            raise UsageError("name experiments by their IDs, or by --phase, --study or --all, not both")
        return list({(e := experiment(name)).id: e for name in ids}.values())  # each once
    if study and everything:
        raise UsageError("--all is all of the paper's study; --study NAME alone is all of another")
    if phase is not None or study or everything:
        wanted = study or "paper"
        found = [e for e in known.values() if e.study == wanted and (phase is None or e.phase == phase)]
        if not found:
            raise UsageError(f"the study {wanted} has no phase {phase}: phases are the paper's")
        return found
    raise UsageError("name what to run: IDs, --phase N, --study NAME or --all (`oelm list` shows them)")


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
