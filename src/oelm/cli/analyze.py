"""`oelm analyze`: print tables, differences with confidence intervals, and verdicts in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from oelm.cli.options import Catalogue, Json, Phases, Runs, load_catalogues
from oelm.cli.output import print, print_json, print_table, print_text
from oelm.errors import OelmError, UsageError
from oelm.experiments.catalogue import planned_configs, reported_with

if TYPE_CHECKING:
    from oelm.analysis.analyze import Analysis
    from oelm.report.document import Block

BENCHMARKS = "benchmarks/results"


@Parameter(name="*")
@dataclass(frozen=True)
class ResultsOptions:
    """Options that choose the results to analyze, and the folders that contain them."""

    phase: Phases = ()
    runs: Runs = "runs"
    benchmarks: str = BENCHMARKS
    """Folder with the results of step-time benchmarks."""
    catalogue: Catalogue = ()

    def load(self, studies: Sequence[str] = ()) -> Analysis:
        """Return the analysis of the runs of `studies` (default: all studies).

        Raises OelmError if there are no runs.
        """
        from oelm.analysis.analyze import analyze

        load_catalogues(self.catalogue)
        if self.benchmarks != BENCHMARKS and not Path(self.benchmarks).is_dir():
            raise UsageError(f"--benchmarks: folder {self.benchmarks} does not exist; give an existing one")
        if self.phase and studies:
            raise UsageError(
                "study names cannot be combined with --phase, which selects runs of the study 'paper': leave "
                "out the study names or --phase"
            )
        ids = reported_with(self.phase) if self.phase else None
        chosen = ["paper"] if self.phase else studies
        analysis = analyze(Path(self.runs), chosen, Path(self.benchmarks), planned=planned_configs(), ids=ids)
        if not (analysis.loaded.runs or analysis.loaded.trials or analysis.warnings):
            of_phase = f" of phase {', '.join(self.phase)}" if self.phase else ""
            raise OelmError(
                f"no runs{of_phase} in {self.runs} yet; train some with `oelm demo`, `oelm train` or "
                "`oelm run`, or give a different folder with --runs"
            )
        return analysis


def analyze(
    *studies: str,
    everything: Annotated[bool, Parameter(name="--all")] = False,
    options: ResultsOptions = ResultsOptions(),
    json: Json = False,
) -> None:
    """Print the comparisons and verdicts of the finished runs.

    Parameters
    ----------
    studies
        Only these studies (default: all).
    everything
        Also print the cost of each arm, tables across datasets, and how many runs are finished and pending.
    """
    analysis = options.load(studies)
    if json:
        print_json(analysis.to_dict())
        return
    from oelm.report.sections.plan import SECTIONS, Shown
    from oelm.report.summary import headline
    from oelm.report.translate import Translator

    _ = Translator("en")
    print(headline(analysis, _))
    most = Shown.ANALYZE_ALL if everything else Shown.ANALYZE
    for section in (section for section in SECTIONS if section.shown <= most):
        blocks = section.blocks(analysis, _)
        if blocks:
            title = _(section.title)
            print(f"\n{title}\n{'=' * len(title)}\n")
            print_blocks(blocks)
    print_warnings(analysis)


def print_warnings(analysis: Analysis) -> None:
    if analysis.warnings:
        print(f"\nRun folders that need attention: {len(analysis.warnings)}")
        for warning in analysis.warnings:
            print(f"  {warning}")


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print the blocks of a report (paragraphs, tables, ...) as plain text, without figures."""
    from oelm.report.document import Bullets, Cards, Fold, Link, Paragraph, Table, inlines, plain

    for block in blocks:
        if isinstance(block, Paragraph):
            print_text(plain(block.text))
            print()
        elif isinstance(block, Cards):
            for card in block.cards:
                print(f"{card.title}: {card.badge}")
                for line in card.lines:
                    words = tuple(part for part in inlines(line) if not isinstance(part, Link))
                    print_text(plain(words).rstrip(), indent="  ", hang="  ")
                print()
        elif isinstance(block, Table):
            if block.caption:
                print(block.caption)
            print_table(block.head, [[plain(cell) for cell in row.cells] for row in block.rows], indent="  ")
            print()
        elif isinstance(block, Bullets):
            for item in block.lines:
                print_text(plain(item), indent="  - ")
            print()
        elif isinstance(block, Fold):
            print(block.title)
            print_blocks(block.blocks)
