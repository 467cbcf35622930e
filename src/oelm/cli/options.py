"""Arguments that several commands share, so that they read the same everywhere."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oelm.cli.values import Labels, WholeNumbers
from oelm.config.run_config import Machine
from oelm.errors import UsageError, unknown_name
from oelm.experiments.catalogue import (
    STUDIES,
    catalogue_files,
    load_catalogue_files,
    loaded_catalogue_files,
    select,
)
from oelm.experiments.experiment import DEFAULT_SEED, Experiment
from oelm.experiments.scales import SCALES
from oelm.runs.scan import RunInfo


def command_parser(subparsers: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    """A sub-parser with its one-line purpose and an example that can be copied."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=text, description=text[:1].upper() + text[1:] + ".", epilog=f"example:\n  {example}"
    )
    parser.set_defaults(command=name)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs",
        default=os.environ.get("OELM_RUNS", "runs"),
        metavar="DIR",
        help="folder of all runs (or OELM_RUNS)",
    )


def add_catalogue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--catalogue", action="append", default=[], metavar="FILE.py",
        help="a Python file that registers experiments of your own (or OELM_CATALOGUE)",
    )  # fmt: skip


def add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale", default="full", metavar="|".join(SCALES), help="full (default), mini or smoke"
    )


def add_changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="changes",
        help="change any field of the config by its dotted name, e.g. optim.lr=1e-3, method=oelm-plus",
    )  # fmt: skip
    parser.add_argument(
        "--as",
        dest="study_name",
        default="",
        metavar="STUDY",
        help="file the runs under another study's name",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="ID", help="experiments (`oelm list`)")
    add_phase(parser, "all of these phases of the original study")
    parser.add_argument("--study", default="", metavar="NAME", help="all of a study, e.g. gap")
    parser.add_argument("--all", action="store_true", dest="everything", help="all of the study `paper`")
    add_catalogue(parser)


def add_phase(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--phase",
        action=Labels,
        nargs="+",
        default=[],
        metavar="N",
        help=f"{text}: 1, 1 4, 1-4, paper, extra",
    )


def add_seeds(parser: argparse.ArgumentParser, default: Sequence[int] = (DEFAULT_SEED,)) -> None:
    shown = " ".join(map(str, default))
    parser.add_argument(
        "--seeds", action=WholeNumbers, nargs="+", default=list(default), metavar="N",
        help=f"0 1 2, 0,1,2 or 0-3 (default: {shown})",
    )  # fmt: skip


def add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--data-dir", default="", metavar="DIR", help="local datasets (or OELM_DATA_DIR)")
    group.add_argument(
        "--cache-dir", default="", metavar="DIR", help="tokens and tokenizers (or OELM_CACHE_DIR)"
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    group.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 = decided by the launcher or torch"
    )
    group.add_argument(
        "--track",
        action="append",
        default=[],
        metavar="NAME",
        help="also log to tensorboard, wandb or trackio",
    )
    group.add_argument("--skip-bad-rows", action="store_true", help="leave broken rows out and count them")
    group.add_argument(
        "--shard",
        action="store_true",
        help="divide network and optimizer between the GPUs of a run (FSDP), when one cannot hold them",
    )


def machine_from(args: argparse.Namespace, time_limit: float = 0.0) -> Machine:
    return Machine(
        device=args.device,
        threads=args.threads,
        data_dir=args.data_dir,
        cache_dir=args.cache_dir,
        time_limit=time_limit,
        trackers=tuple(args.track),
        skip_bad_rows=args.skip_bad_rows,
        shard=args.shard,
        command=shlex.join(sys.argv),
        catalogue_files=loaded_catalogue_files(),
    )


def check_machine(args: argparse.Namespace) -> None:
    """Refuse what the user named and this machine does not have, before anything starts."""
    require_writable(args.runs, "--runs / OELM_RUNS")
    cache = args.cache_dir or os.environ.get("OELM_CACHE_DIR", "")
    if cache:
        require_writable(cache, "--cache-dir / OELM_CACHE_DIR")
    if args.data_dir or os.environ.get("OELM_DATA_DIR"):
        from oelm.data.sources.open import data_folder

        data_folder(args.data_dir)
    if args.threads < 0:
        raise UsageError(f"--threads is 0 (automatic) or more, not {args.threads}")
    if args.track:
        from oelm.training.logs.trackers import check_trackers

        check_trackers(args.track)
    if args.device not in ("auto", "cpu"):
        from oelm.training.parallel.world import choose_device  # torch: only where a device is named

        choose_device(args.device)


def require_writable(folder: str, flag: str) -> None:
    """Refuse a folder that exists as a file, or that cannot be made or written in. Leaves nothing behind."""
    path = Path(folder).expanduser()
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        why = f"no permission to write in {path}" if path.is_dir() else f"{path} is not a folder"
        raise UsageError(f"{flag}: {folder} cannot be used: {why}")


def chosen_experiments(args: argparse.Namespace) -> list[Experiment]:
    load_own(args)
    return select(args.ids, phases=args.phase, study=args.study, everything=args.everything)


def load_own(args: argparse.Namespace) -> None:
    load_catalogue_files([*catalogue_files(), *args.catalogue])


def require_study(name: str, runs: Iterable[RunInfo]) -> None:
    """Refuse a study that is neither catalogued nor among the runs: a typo would show an empty table."""
    known = {*STUDIES, *(run.study for run in runs)}
    if name and name not in known:
        raise unknown_name("study", name, sorted(known))


def duration(text: str) -> float:
    """Seconds from `90`, `90s`, `45m`, `12h` or SLURM's `D-HH:MM:SS` / `HH:MM:SS`.

    >>> duration("1h"), duration("00:01:30"), duration("1-00:00:00")
    (3600.0, 90.0, 86400.0)
    """
    try:
        seconds = _seconds(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"'{text}' is no duration; write 90s, 45m, 12h or HH:MM:SS")
    return seconds


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if ":" in text:
        days, _, clock = text.rpartition("-")
        seconds = 0.0
        for part in clock.split(":"):
            seconds = seconds * 60 + float(part)
        return seconds + 86400 * int(days or 0)
    if text[-1:] in units:
        return float(text[:-1]) * units[text[-1]]
    return float(text)
