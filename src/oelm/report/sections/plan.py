"""The sections of the report in reading order. `oelm analyze` and `oelm report` use the same list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from oelm.analysis.analyze import Analysis
from oelm.analysis.messages import Message
from oelm.report import summary
from oelm.report.document import Block
from oelm.report.sections import answers, comparisons, overview, run_list
from oelm.report.translate import Translator


class Shown(IntEnum):
    """The shortest output that includes a section; the longer outputs include it, too."""

    ANALYZE = 1  # `oelm analyze`
    ANALYZE_ALL = 2  # `oelm analyze --all`
    REPORT = 3  # `oelm report`


@dataclass(frozen=True)
class SectionPlan:
    """A section of the report: its anchor and title, the function that builds it, and when it is shown."""

    anchor: str  # target of links to the section; also its key in `charts.all_charts()`
    title: Message
    blocks: Callable[[Analysis, Translator], list[Block]]  # a section without blocks is left out
    shown: Shown


SECTIONS = (
    SectionPlan("verdict", Message("Verdicts"), summary.cards, Shown.ANALYZE),
    SectionPlan("questions", Message("Questions"), answers.question_table, Shown.ANALYZE),
    SectionPlan("mean", Message("Average over datasets"), comparisons.mean_table, Shown.ANALYZE_ALL),
    SectionPlan(
        "comparisons", Message("Every arm against its baseline"), comparisons.baseline_tables, Shown.ANALYZE
    ),
    SectionPlan("control", Message("What freezing alone costs"), comparisons.control_table, Shown.ANALYZE),
    SectionPlan("goal", Message("What closes the gap"), comparisons.goal_table, Shown.ANALYZE),
    SectionPlan(
        "orthogonality", Message("Orthogonality or scale?"), comparisons.orthogonality_table, Shown.ANALYZE
    ),
    SectionPlan("where", Message("Where freezing works"), overview.where_freezing_works, Shown.ANALYZE_ALL),
    SectionPlan("costs", Message("Cost of each arm"), overview.cost_table, Shown.ANALYZE_ALL),
    SectionPlan("trend", Message("Across datasets"), overview.trend_table, Shown.ANALYZE_ALL),
    SectionPlan("training", Message("Training"), lambda analysis, _: [], Shown.REPORT),
    SectionPlan("reported", Message("Reported and reproduced"), overview.reported_tables, Shown.ANALYZE_ALL),
    SectionPlan("limitations", Message("Limitations"), run_list.limitations, Shown.REPORT),
    SectionPlan("totals", Message("Finished and pending"), run_list.totals, Shown.ANALYZE_ALL),
    SectionPlan("warnings", Message("Folders that need attention"), run_list.warnings, Shown.REPORT),
)
