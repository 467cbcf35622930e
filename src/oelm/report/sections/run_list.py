"""Build the last sections of the report: limitations, pending runs, and the list of all runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from oelm.analysis.analyze import Analysis
from oelm.analysis.arms import Arm
from oelm.analysis.load import FINISHED
from oelm.analysis.messages import Message, state_name
from oelm.report import numbers
from oelm.report.document import Block, Bullets, Code, Fold, Link, Paragraph, Row, Table, Text
from oelm.report.sentences import SCALES
from oelm.report.summary import anchor
from oelm.report.translate import Translator
from oelm.units import duration_text

LONG_COMMAND = 80  # characters; a longer command is printed only once, with a number that the runs refer to
SOURCES = {
    "local": Message("local files"),
    "hub": Message("downloaded from the Hugging Face Hub"),
    "builtin": Message("generated text"),
}


def limitations(analysis: Analysis, _: Translator) -> list[Block]:
    return [Bullets(tuple(limitation_texts(analysis, _)))]


def limitation_texts(analysis: Analysis, _: Translator) -> list[str]:
    """Return sentences on what the intervals and comparisons of this analysis do not cover."""
    made = [c for c in analysis.comparisons.made if c.effect is not None]
    texts = []
    if seeds_only := [c for c in made if c.metric == "ppl" and c.test_error == "none"]:
        texts.append(
            _(
                "1 perplexity interval covers the seeds, not the choice of test text, because its runs have "
                "no losses per document. All other intervals cover both."
            )
            if len(seeds_only) == 1
            else _(
                "{n} perplexity intervals cover the seeds, not the choice of test text, because their runs "
                "have no losses per document. All other intervals cover both.",
                n=len(seeds_only),
            )
        )
    if len(made) > 1:
        texts.append(
            _(
                "{n} comparisons were made, with no correction for their number. If all of them lay "
                "exactly on a margin, about {wrong} would be judged wrongly by chance.",
                n=len(made),
                wrong=f"{0.05 * len(made):.1f}",
            )
        )
    trial_seeds = {len(c.arm.config.tune.seeds) for c in made if c.arm.config.tune.grid}
    if trial_seeds:
        texts.append(
            _(
                "A tuned learning rate is the best of its arm's grid on validation, with {seeds} seed(s) per "
                "trial. The intervals take it as given: other trials might choose a neighbouring "
                "learning rate.",
                seeds=" / ".join(map(str, sorted(trial_seeds))),
            )
        )
    if any(c.lr_choice_sd is not None for c in made):
        texts.append(
            _(
                "The column “Tuning ±” is the standard deviation that the choice of the learning rates adds "
                "to a change, because new tuning trials with other seeds might choose differently. It is "
                "measured on validation data with the length of a trial, and is not part of the interval."
            )
        )
    small = tuple(SCALES[s] for s in ("mini", "smoke") if any(c.arm.config.scale == s for c in made))
    if small:
        texts.append(
            _(
                "At {scales} scale a small network trains briefly: the gap may grow or vanish in longer "
                "training and larger models.",
                scales=small,
            )
        )
    if not all(cost.step for cost in analysis.costs.values()):
        texts.append(
            _("Arms without a benchmark have no step time; the wall times of runs are not compared.")
        )
    if analysis.states["diverged"]:
        texts.append(
            _(
                "1 run diverged. It is a result, not a missing value; comparisons that would leave it out "
                "get no verdict."
            )
            if analysis.states["diverged"] == 1
            else _(
                "{n} runs diverged. They are results, not missing values; comparisons that would leave them "
                "out get no verdict.",
                n=analysis.states["diverged"],
            )
        )
    if sources := _origins(analysis.arms):
        texts.append(_("Text of each dataset: {sources}", sources=sources))
    texts.append(_("Verdicts use Student's t intervals over paired seeds."))
    if sequential := sorted({c.arm.config.study for c in analysis.comparisons.made if c.max_seeds}):
        texts.append(
            _(
                "Intervals of studies that oelm decide trained ({studies}) are wider than for a fixed number "
                "of seeds, so that they stay valid although the results were looked at after every seed.",
                studies=", ".join(sequential),
            )
        )
    return texts


def _origins(arms: Sequence[Arm]) -> tuple[Message, ...]:
    """Return the sources of each dataset: a run can use generated text in place of the real dataset."""
    found: dict[tuple[str, str], Message] = {}
    for arm in arms:
        if arm.finished and (recorded := arm.finished[0].manifest.data.origin):
            dataset, origin = arm.config.data.dataset, _origin(arm, recorded)
            text = Message("{dataset} ({origin})", dataset=dataset, origin=origin)
            found.setdefault((dataset, str(origin)), text)
    return tuple(found.values())


def _origin(arm: Arm, recorded: str) -> str | Message:
    """Return the source of an arm's data in words; for the source "auto", the text that a run recorded."""
    return SOURCES.get(arm.config.data.source, recorded)


def totals(analysis: Analysis, _: Translator) -> list[Block]:
    """Return the table with the number of runs, compute time and disk space, then the unfinished runs."""
    states = tuple(
        Message("{n} {state}", n=n, state=state_name(s)) for s, n in sorted(analysis.states.items())
    )
    rows = (
        Row((_("Runs"), _("{n} ({states})", n=len(analysis.loaded.runs), states=states or "–"))),
        Row((_("Tuning trials"), str(len(analysis.loaded.trials)))),
        Row((_("Compute time"), duration_text(analysis.compute_seconds))),
        Row((_("Disk"), numbers.size(analysis.disk_bytes))),
    )
    return [Table((_("Total"), ""), rows, words=1), *_pending(analysis, _)]


def _pending(analysis: Analysis, _: Translator) -> list[Block]:
    items: list[Text] = []
    for run in analysis.loaded.runs:
        if run.state != FINISHED:
            items.append(
                _(
                    "{id} seed {seed} ({scale}): {state} at step {progress}{reason}",
                    id=run.id,
                    seed=run.seed,
                    scale=SCALES[run.config.scale],
                    state=state_name(run.state),
                    progress=f"{run.step} / {run.total_steps}" if run.total_steps else str(run.step),
                    reason=f" ({run.reason})" if run.reason else "",
                )
            )
    items.extend(_(m) for m in analysis.comparisons.waiting)
    blocks: list[Block] = [Bullets(tuple(items))]
    if not items:
        blocks = [Paragraph(_("All runs that were started have finished."))]
    never = analysis.never_started
    if never:
        title = _("In the catalogue, not started ({n})", n=len(never))
        blocks.append(Fold(title, (Paragraph(", ".join(never)),)))
    return blocks


def warnings(analysis: Analysis, _: Translator) -> list[Block]:
    texts = tuple(" ".join(f"{w.path}: {_(w.what)}".split()) for w in analysis.warnings)
    return [Bullets(texts)] if texts else []


def run_list(analysis: Analysis, _: Translator, folder: Path) -> list[Block]:
    """Return the list of all runs with score, command and a link to the run folder.

    folder: folder of the report file; the links are relative to it
    """
    blocks: list[Block] = [
        Paragraph(
            _(
                "Each number above links to this list: its seeds, their folders, and the command that "
                "reproduces it."
            )
        )
    ]
    for study in dict.fromkeys(a.config.study for a in analysis.arms):
        arms = [a for a in analysis.arms if a.config.study == study]
        commands = dict.fromkeys(run.command for arm in arms for run in arm.runs)
        long = [c for c in commands if len(c) > LONG_COMMAND]
        numbered = {c: _("command {n}", n=i) for i, c in enumerate(long, 1)}
        listed: list[Text] = [
            (_("{name}: {text}", name=name, text=""), Code(command)) for command, name in numbered.items()
        ]
        listed += dict.fromkeys(_rows_text(arm, _) for arm in arms if _rows_text(arm, _))
        inner: list[Block] = [Bullets(tuple(listed))] if listed else []
        inner += [_arm_table(arm, numbered, folder, _) for arm in arms]
        n = sum(len(a.runs) for a in arms)
        title = _("{study}: 1 run", study=study) if n == 1 else _("{study}: {n} runs", study=study, n=n)
        blocks.append(Fold(title, tuple(inner)))
    return blocks


def _arm_table(arm: Arm, numbered: dict[str, str], folder: Path, _: Translator) -> Table:
    rows = []
    for i, run in enumerate(arm.runs):
        score = run.result.test if run.result else None
        cells: tuple[Text, ...] = (
            str(run.seed),
            _(state_name(run.state)),
            (Link(run.path.name, relative_link(run.reader.file, folder)),),
            numbered.get(run.command, (Code(run.command),)),
            numbers.score(score, run.result.metric) if run.result and score is not None else "–",
        )
        rows.append(Row(cells, anchor=anchor(arm) if i == 0 else ""))
    head = (_("Seed"), _("State"), _("Folder"), _("Command"), _("Test"))
    return Table(head, tuple(rows), f"{arm.id} · {arm.name} · {_(SCALES[arm.config.scale])}", words=4)


def _rows_text(arm: Arm, _: Translator) -> str:
    """Return the origin and size of an arm's training data; "" if the run's manifest does not record them."""
    data = arm.first.manifest.data
    rows = data.rows.get("train")
    if not rows:
        return ""
    return _(
        "{dataset}: {origin}, {rows} rows to train on",
        dataset=arm.config.data.dataset,
        origin=_origin(arm, data.origin),
        rows=f"{rows:,}",
    )


def relative_link(path: Path, folder: Path) -> str:
    """Return the relative link from a file in `folder` to `path`.

    It always starts with a dot, so that no path can be mistaken for a URL.
    """
    relative = os.path.relpath(path.resolve(), folder.resolve())
    quoted = quote(Path(relative).as_posix(), safe="/=")
    return quoted if quoted.startswith("../") else "./" + quoted
