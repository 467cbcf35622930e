"""Options that several commands share, with the checks of their values."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter, Token

from oelm.cli.values import Count, Integer, Integers, PhaseNames
from oelm.config.run_config import Scale
from oelm.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from oelm.config.run_config import Machine
    from oelm.experiments.experiment import Experiment

ExperimentId = Annotated[str, Parameter(help="ID of an experiment (`oelm list`).")]
IdOrFile = Annotated[
    str, Parameter(help="ID of an experiment (`oelm list`), or a study file such as my.yaml.")
]
ArmName = Annotated[str, Parameter(help="Name of one arm, if the first argument is a study file.")]
OUTPUT = Parameter(name=("--output", "-o"))


def _not_empty(_: object, value: str) -> None:
    if not value:  # such as --runs "$UNSET"; it would mean the current folder
        raise UsageError("--runs (or OELM_RUNS) is empty; give the name of the runs folder")


def _expanded(_: object, tokens: Sequence[Token]) -> str:
    return os.path.expanduser(tokens[0].value)  # a shell leaves the ~ of --runs=~/runs to the program


Runs = Annotated[
    str,
    Parameter(
        name="--runs",
        env_var="OELM_RUNS",
        help="Folder of all runs.",
        validator=_not_empty,
        converter=_expanded,
        n_tokens=1,
    ),
]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as JSON.")]
Study = Annotated[str, Parameter(name="--study", help="Only this study, e.g. gap.")]
Phases = Annotated[
    PhaseNames,
    Parameter(
        name="--phase",
        help="Experiments of these phases of the original study: 1, 1 4, 1-4, paper or extra.",
    ),
]
Seeds = Annotated[
    Integers,
    Parameter(
        name="--seeds",
        help="Seeds of the runs: 0 1 2, 0,1,2 or 0-3 (default: those of the study file, otherwise 42).",
    ),
]
Catalogue = Annotated[
    tuple[str, ...],
    Parameter(
        name="--catalogue",
        help="Study file, or Python file that registers your own experiments or datasets "
        "(or OELM_CATALOGUE); repeatable.",
    ),
]
DataDir = Annotated[str, Parameter(name="--data-dir", help="Folder of local datasets (or OELM_DATA_DIR).")]
CacheDir = Annotated[
    str, Parameter(name="--cache-dir", help="Folder of prepared tokens and tokenizers (or OELM_CACHE_DIR).")
]
SkipBadRows = Annotated[
    bool, Parameter(name="--skip-bad-rows", help="Leave bad rows of the dataset out and count them.")
]
OneScale = Annotated[
    Scale,
    Parameter(
        name="--scale",
        help="Size of the runs. full: as in the original study; mini: minutes on a CPU; smoke: seconds.",
    ),
]
Seed = Annotated[
    Integer | None,
    Parameter(name="--seed", help="Seed of the run (default: the first of the study file, otherwise 42)."),
]


def shown_default(value: Any) -> str | None:
    """Return the default value of an option as text for --help; None if --help should not show it."""
    if value is None or value == "" or value == () or value == 0:
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@Parameter(name="*")
@dataclass(frozen=True)
class Selection:
    """Options that select experiments of the catalogue by phase or study instead of by ID."""

    phase: Phases = ()
    study: Annotated[Study, Parameter(help="All experiments of this study, e.g. gap.")] = ""
    everything: Annotated[bool, Parameter(name="--all")] = False
    """All experiments of the original study."""
    catalogue: Catalogue = ()

    def experiments(self, ids: Sequence[str]) -> list[Experiment]:
        from oelm.experiments.catalogue import select

        load_catalogues(self.catalogue)
        return select(ids, phases=self.phase, study=self.study, everything=self.everything)

    def is_empty(self) -> bool:
        return not (self.phase or self.study or self.everything)


@Parameter(name="*")
@dataclass(frozen=True)
class Changes:
    """Options that change the configs of experiments."""

    fields: Annotated[tuple[str, ...], Parameter(name="--set")] = ()
    """Change fields of the config by their dotted names, e.g. optim.lr=1e-3 method=oelm-plus; repeatable."""
    study_name: Annotated[str, Parameter(name="--as")] = ""
    """Store the runs under a different study name."""

    def values(self) -> dict[str, Any]:
        """Return the config fields to change, as {dotted field name: new value}."""
        from oelm.config.overrides import changes_from_words

        return changes_from_words(self.fields)


@Parameter(name="*", group=Group("Machine", sort_key=9))
@dataclass(frozen=True)
class MachineOptions:
    """Options that say how this machine trains. They are not part of the config of a run."""

    data_dir: DataDir = ""
    cache_dir: CacheDir = ""
    device: str = "auto"
    """Device to train on: auto, cpu, cuda, cuda:1, ..."""
    threads: Count = 0
    """CPU threads of a run; 0 = automatic."""
    track: tuple[str, ...] = ()
    """Also log to tensorboard, wandb or trackio; repeatable."""
    skip_bad_rows: SkipBadRows = False
    shard: bool = False
    """Shard parameters and optimizer state over the GPUs of a run (FSDP), if one GPU cannot hold them."""

    def machine(self, time_limit: float = 0.0) -> Machine:
        from oelm.config.run_config import Machine
        from oelm.experiments.catalogue import loaded_catalogue_files

        return Machine(
            device=self.device,
            threads=self.threads,
            data_dir=self.data_dir,
            cache_dir=self.cache_dir,
            time_limit=time_limit,
            trackers=self.track,
            skip_bad_rows=self.skip_bad_rows,
            shard=self.shard,
            command=shlex.join(sys.argv),
            catalogue_files=loaded_catalogue_files(),
        )

    def check(self, runs: str) -> None:
        """Raise UsageError if an option names a folder, tracker or device that this machine does not have."""
        require_writable(runs, "--runs / OELM_RUNS")
        require_writable_cache(self.cache_dir)
        if self.data_dir or os.environ.get("OELM_DATA_DIR"):
            from oelm.data.sources.open import data_folder

            data_folder(self.data_dir)
        if self.track:
            from oelm.training.logs.trackers import check_trackers

            check_trackers(self.track)
        if self.device not in ("auto", "cpu"):
            from oelm.training.parallel.world import choose_device  # here, because it imports torch (slow)

            choose_device(self.device)


def require_writable_cache(folder: str) -> None:
    if folder := folder or os.environ.get("OELM_CACHE_DIR", ""):
        require_writable(folder, "--cache-dir / OELM_CACHE_DIR")


def require_writable(folder: str, flag: str) -> None:
    """Raise UsageError if the folder cannot be created or written to. Nothing is created.

    flag: name of the option, for the error message
    """
    path = Path(folder).expanduser()
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        why = f"no permission to write in {path}" if path.is_dir() else f"{path} is not a folder"
        raise UsageError(f"{flag}: {folder} cannot be used: {why}; choose another folder")


def load_catalogues(files: Iterable[str]) -> None:
    """Load the study files and Python files that OELM_CATALOGUE (environment) and `--catalogue` name."""
    from oelm.experiments.catalogue import catalogue_files, load_catalogue_files

    load_catalogue_files([*catalogue_files(), *files])


def require_study(name: str, with_runs: Iterable[str]) -> None:
    """Raise UsageError if the study `name` is neither built in nor one of `with_runs`, which have runs."""
    from oelm.experiments.catalogue import STUDIES

    known = {*STUDIES, *with_runs}
    if name and name not in known:
        raise unknown_name("study", name, sorted(known))
