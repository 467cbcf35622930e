"""The report: verdict first, then what it rests on, then what it does not show."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

import oelm
from oelm.analysis.analyze import Analysis
from oelm.analysis.load import FINISHED
from oelm.files.atomic import write_text
from oelm.report import closing, findings
from oelm.report.document import Block, Bullets, Code, Document, Figure, Paragraph, Section, Text
from oelm.report.figures import standalone
from oelm.report.html import to_html
from oelm.report.markdown import to_markdown
from oelm.report.plots import MOST_GROUPS, all_figures
from oelm.report.words import Words


def build(analysis: Analysis, folder: Path, *, lang: str = "en", command: str = "oelm report") -> Document:
    """The document; links to run folders are relative to `folder`, where it will lie."""
    w = Words(lang)
    figures = all_figures(analysis, w)
    contents: list[tuple[str, list[Block]]] = [
        ("verdict", [findings.cards(analysis, w)]),
        ("mean", findings.mean_blocks(analysis, w)),
        ("comparisons", [*figures["comparisons"], *findings.comparison_blocks(analysis, w)]),
        ("control", findings.other_comparisons(analysis, "control", w)),
        ("no_loss", closing.no_loss(analysis, w)),
        ("orthogonality", findings.other_comparisons(analysis, "orthogonality", w)),
        ("where", closing.where_freezing_holds(analysis, w)),
        ("efficiency", [*closing.efficiency(analysis, w), *figures["efficiency"]]),
        ("trend", closing.across_datasets(analysis, w)),
        ("figures", [*_limited(analysis, w), *figures["figures"]]),
        ("reported", closing.reported_and_reproduced(analysis, w)),
        ("caveats", [Bullets(tuple(caveats(analysis, w)))]),
        ("totals", closing.totals(analysis, w)),
        ("warnings", _warnings(analysis, w)),
        ("runs", findings.run_blocks(analysis, lambda path: relative_link(path, folder), w)),
    ]
    sections = [Section(w(f"section.{name}"), name, tuple(blocks)) for name, blocks in contents if blocks]
    finished = analysis.states[FINISHED]
    meta: tuple[Text, ...] = (
        w("report.made", root=_shown_root(analysis.loaded.root), version=oelm.__version__),
        w(
            "report.counts",
            runs=len(analysis.loaded.runs),
            finished=finished,
            comparisons=len(analysis.comparisons.made),
        ),
        (w("report.command") + " ", Code(command)),
    )
    return Document(w("report.title"), findings.lead(analysis, w), meta, tuple(sections), lang)


def write_html(analysis: Analysis, path: Path, *, lang: str = "en", command: str = "oelm report") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_html(build(analysis, path.parent, lang=lang, command=command)))
    return path


def write_markdown(analysis: Analysis, path: Path, *, lang: str = "en", command: str = "oelm report") -> Path:
    """The file, and `<name>_figures/` beside it."""
    document = build(analysis, path.parent, lang=lang, command=command)
    figures = path.parent / f"{path.stem}_figures"
    figures.mkdir(parents=True, exist_ok=True)
    drawn = [b for section in document.sections for b in section.blocks if isinstance(b, Figure)]
    for figure in drawn:
        write_text(figures / f"{figure.name}.svg", standalone(figure.svg))
    for stale in {*figures.glob("*.svg")} - {figures / f"{figure.name}.svg" for figure in drawn}:
        stale.unlink()  # of an earlier report with other groups
    write_text(path, to_markdown(document, figures.name))
    return path


def relative_link(path: Path, folder: Path) -> str:
    """From a file in `folder` to `path`, always beginning with a dot so that it can be nothing else."""
    relative = os.path.relpath(path.resolve(), folder.resolve())
    quoted = quote(Path(relative).as_posix(), safe="/=")
    return quoted if quoted.startswith("../") else "./" + quoted


def caveats(analysis: Analysis, w: Words) -> list[Text]:
    """What a careful reader would ask."""
    made = [c for c in analysis.comparisons.made if c.effect is not None]
    said: list[Text] = [w("caveat.seeds")]
    if len(made) > 1:
        said.append(w("caveat.many", n=len(made), wrong=f"{0.05 * len(made):.1f}"))
    tried = {len(c.arm.config.tune.seeds) for c in made if c.arm.config.tune.grid}
    if tried:
        said.append(w("caveat.rates", seeds=" / ".join(map(str, sorted(tried)))))
    small = [s for s in ("mini", "smoke") if any(c.arm.config.scale == s for c in made)]
    if small:
        said.append(w("caveat.scale", scales=" / ".join(w(f"scale.{s}") for s in small)))
    if not all(cost.step for cost in analysis.costs.values()):
        said.append(w("caveat.time"))
    diverged = analysis.states["diverged"]
    if diverged:
        said.append(w("caveat.diverged", n=diverged))
    said.append(w("caveat.bootstrap"))
    for dataset, origin in _origins(analysis).items():
        said.append(w("caveat.data", dataset=dataset, origin=origin))
    return said


def _origins(analysis: Analysis) -> dict[str, str]:
    """Which text each dataset really was: stand-ins must not pass for the real thing."""
    found: dict[str, str] = {}
    for arm in analysis.arms:
        data = arm.finished[0].manifest.get("data") if arm.finished else None
        if isinstance(data, dict) and data.get("origin"):
            found.setdefault(arm.config.data.dataset, str(data["origin"]))
    return found


def _limited(analysis: Analysis, w: Words) -> list[Block]:
    groups = len(findings.by_group(analysis.comparisons.of("baseline")))
    return [Paragraph(w("figure.limited", drawn=MOST_GROUPS, n=groups))] if groups > MOST_GROUPS else []


def _warnings(analysis: Analysis, w: Words) -> list[Block]:
    said = analysis.warnings
    return [Bullets(tuple(x.text(w.lang) for x in said))] if said else []


def _shown_root(root: Path) -> str:
    """The folder's name without the machine's own path, when it lies below the working folder."""
    try:
        return str(root.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(root)
