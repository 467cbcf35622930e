"""Prepare the content of the board's pages as plain values for the templates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oelm.analysis.arms import Arm
from oelm.analysis.messages import Message, state_name
from oelm.config.diff import config_diff
from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError
from oelm.experiments.launch.worker import CONSOLE
from oelm.report import numbers
from oelm.report.board.curves import measurements_of
from oelm.report.board.forest import CAPTIONS, by_seeds, forest
from oelm.report.board.metrics import MEASUREMENTS
from oelm.report.board.questions import ShownQuestion
from oelm.report.board.snapshot import Board
from oelm.report.document import Tone
from oelm.report.sections.answers import RULES
from oelm.report.sentences import place
from oelm.report.translate import Translator
from oelm.runs.folder import RunFolder
from oelm.runs.progress import seconds_left
from oelm.runs.scan import RunInfo, tail
from oelm.runs.schema import TimingStats
from oelm.runs.states import STATES, TROUBLE
from oelm.units import bytes_text, duration_text

LOG_LINES = 20
_TONES: dict[str, Tone] = {"running": "good", "finished": "", "interrupted": "open", "queued": "open"}
_SCORES = ("ppl", "accuracy", "validation_loss")  # the first chart shows the first of these that runs have
_OF_RUNS = ("lr", "entropy", "step_time", "memory")  # further charts of the pages of one run and of two runs

_TIMES = {
    "total_wall_time": Message("wall time"),
    "mean_step_time": Message("mean step time"),
    "median_step_time": Message("median step time"),
    "p95_step_time": Message("95th percentile of step time"),
    "total_validation_time": Message("time of validations"),
}


@dataclass(frozen=True)
class RunRow:
    """One row of a table of runs."""

    key: str
    name: str
    state: str
    state_text: str
    tone: Tone
    step: int
    total: int
    loss: str
    metric: str
    eta: str
    reason: str


@dataclass(frozen=True)
class StudyCard:
    """A study on the overview page."""

    name: str
    tone: Tone
    summary: str
    finished: int
    total: int
    states: tuple[tuple[str, Tone], ...]
    eta: str
    forests: tuple[dict[str, Any], ...]
    hidden: int  # number of questions that only the page of the study shows


def run_row(key: str, run: RunInfo, _: Translator) -> RunRow:
    status = run.status
    return RunRow(
        key,
        run.name,
        run.state,
        _(state_name(run.state)),
        state_tone(run.state),
        status.step if status else 0,
        status.total_steps if status else 0,
        f"{status.loss:.4f}" if status and status.loss is not None else "–",
        f"{status.metric.name} {status.metric.value:.4g}" if status and status.metric else "–",
        duration_text(status.eta_seconds) if status and run.state == "running" else "–",
        run.reason,
    )


def state_tone(state: str) -> Tone:
    return "bad" if state in TROUBLE else _TONES.get(state, "")


def overview(board: Board, _: Translator) -> dict[str, Any]:
    runs = board.runs
    studies: dict[str, dict[str, RunInfo]] = {}
    for key, run in runs.items():
        studies.setdefault(run.study, {})[key] = run
    trouble = [run_row(key, run, _) for key, run in runs.items() if run.state in TROUBLE]
    trouble.sort(key=lambda row: STATES.index(row.state))
    return {
        "headline": _headline(board, runs, _),
        "studies": [_card(board, name, found, _) for name, found in studies.items()],
        "trouble": trouble,
    }


def _headline(board: Board, runs: Mapping[str, RunInfo], _: Translator) -> str:
    asked = board.verdicts.questions
    decided = sum(q.decided for q in asked)
    states = Counter(run.state for run in runs.values())
    parts = [
        _("Questions: {n} decided, {open} undecided.", n=decided, open=len(asked) - decided),
        _(
            "Runs: {n} of {total} finished, {running} in progress.",
            n=states["finished"],
            total=len(runs),
            running=states["running"],
        ),
    ]
    if trouble := sum(states[state] for state in TROUBLE):
        parts.append(_("Runs that need attention: {n}.", n=trouble))
    return _.join(parts)


def _card(board: Board, study: str, runs: Mapping[str, RunInfo], _: Translator, most: int = 6) -> StudyCard:
    asked = questions(board, study)
    decided = sum(q.decided for q in asked)
    states = Counter(run.state for run in runs.values())
    main = [q for q in asked if q.comparison and q.kind in (*RULES, "baseline", "control")][:most]
    summary = _("Questions: {n} decided, {open} undecided.", n=decided, open=len(asked) - decided)
    return StudyCard(
        study,
        "bad" if TROUBLE & states.keys() else "good" if states["running"] else "",
        summary if asked else _("No questions."),
        states["finished"],
        len(runs),
        tuple((_count(states, s, _), state_tone(s)) for s in STATES if states[s]),
        time_left(runs.values(), _),
        tuple(forests(main, _)),
        len(asked) - len(main),
    )


def _count(states: Counter[str], state: str, _: Translator) -> str:
    """Return how many runs are in a state, in words."""
    return _("{n} {state}", n=states[state], state=state_name(state))


def questions(board: Board, study: str) -> list[ShownQuestion]:
    return [q for q in board.verdicts.questions if q.study == study]


def find_question(board: Board, study: str, key: Mapping[str, str]) -> ShownQuestion | None:
    return next((q for q in questions(board, study) if q.key() == key), None)


def question_arms(board: Board, question: ShownQuestion) -> list[Arm]:
    """Return the two arms of a question, reference first, with all runs, even if not all are compared."""
    c, arms = question.comparison, {arm.key: arm for arm in board.verdicts.arms}
    keys = ([c.reference.key] if c else []) + [question.arm.key]
    return [arms[key] for key in keys if key in arms]


def forests(asked: Iterable[ShownQuestion], _: Translator) -> list[dict[str, Any]]:
    """Return one forest plot per metric; questions without a comparison are left out."""
    by_metric: dict[str, list[ShownQuestion]] = {}
    for q in asked:
        if q.comparison:
            by_metric.setdefault(q.comparison.metric, []).append(q)
    found = []
    for metric, same in by_metric.items():
        plot = forest(same, _)
        about = [f"{_(q.asked)} · {place(q.arm, _)}" for q in same]
        rows = list(zip(plot.rows, (q.key() for q in same), about, strict=True))
        found.append({"caption": _(CAPTIONS[metric]), "rows": rows, "ticks": plot.ticks})
    return found


def time_left(runs: Iterable[RunInfo], _: Translator) -> str:
    """Return the time until all runs have finished at the present speed, or "" if none is running."""
    seconds = seconds_left(runs)
    return "" if seconds is None else _("about {time} left", time=duration_text(seconds))


def study(board: Board, name: str, chosen: str, _: Translator) -> dict[str, Any] | None:
    """Return the page of a study, which shows one group of arms; None if there is no such study.

    A group contains the arms that are compared with each other. Runs that belong to no group, for example
    because they cannot be read, are shown with every group.

    chosen: name of the group (a key of `arm_groups()`); the first group if there is none with this name
    """
    runs = {key: run for key, run in board.runs.items() if run.study == name}
    if not runs:
        return None
    groups = arm_groups(board, name)
    group = chosen if chosen in groups else next(iter(groups), "")
    arms = groups.get(group, [])
    in_group = {arm.key for arm in arms}
    asked = [q for q in questions(board, name) if q.arm.key in in_group]
    of_others = {key for other, found in groups.items() if other != group for key in _keys(board, found)}
    listed = {key: run for key, run in runs.items() if not run.trial and key not in of_others}
    rows = [run_row(key, run, _) for key, run in listed.items()]
    return {
        "card": _card(board, name, runs, _, most=0),
        "forests": forests(asked, _),
        "waiting": [_(q.title) for q in asked if q.comparison is None],
        "groups": [(key, place(found[0], _)) for key, found in groups.items()],
        "group": group,
        "charts": charts(measurements_of(board, _keys(board, arms)), _),
        "arms": [_arm_row(arm, _) for arm in arms],
        "runs": sorted(rows, key=lambda row: STATES.index(row.state)),
        "trials": sum(bool(run.trial) for run in runs.values()),
    }


def arm_groups(board: Board, study: str) -> dict[str, list[Arm]]:
    """Return {name of a group: its arms}; arms of a study are compared only within their group."""
    found: dict[str, list[Arm]] = {}
    for arm in board.verdicts.arms:
        if arm.config.study == study:
            found.setdefault(f"{arm.config.scale} {arm.group}", []).append(arm)
    return found


def _keys(board: Board, arms: Iterable[Arm]) -> list[str]:
    keys = (run.path.relative_to(board.root).as_posix() for arm in arms for run in arm.runs)
    return [key for key in keys if key in board.runs]


def charts(known: Sequence[str], _: Translator, *, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the charts of a page: the measurement that each shows at first, and all that can be chosen.

    The first charts show the validation score and the training loss.

    known: names of the measurements that the runs have
    more: measurements that have a chart of their own if the runs have them
    """
    options = [(name, _(MEASUREMENTS[name])) for name in known]
    score = [name for name in _SCORES if name in known][:1]
    first = [name for name in (*score, "loss", *more) if name in known] or known[:2]
    return [{"measurement": name, "options": options} for name in first]


def _arm_row(arm: Arm, _: Translator) -> dict[str, str]:
    states = Counter(run.state for run in arm.runs)
    times = [run.timing for run in arm.finished]
    steps = [t.mean_step_time for t in times if t.mean_step_time]
    memory = [t.peak_memory_bytes for t in times if t.peak_memory_bytes]
    return {
        "name": arm.name,
        "id": arm.id,
        "score": numbers.score(arm.mean, arm.metric) if arm.finished else "–",
        "n": str(len(arm.finished)),
        "states": _(", ").join(_count(states, s, _) for s in STATES if states[s]),
        "step_time": f"{sum(steps) / len(steps):.3g} s" if steps else "–",
        "memory": bytes_text(max(memory)) if memory else "–",
    }


def question(board: Board, study: str, key: Mapping[str, str], _: Translator) -> dict[str, Any] | None:
    """Return the page of one question; None if there is no such question, or nothing to compare yet."""
    q = find_question(board, study, key)
    if q is None or q.comparison is None:
        return None
    keys = _keys(board, question_arms(board, q))
    return {
        "title": _(q.title),
        "place": place(q.arm, _),
        "study": study,
        "verdict": _(q.answer),
        "tone": q.tone,
        "sentences": [_(message) for message in q.sentences],
        "caption": _(CAPTIONS[q.comparison.metric]),
        "seeds": by_seeds(q, _),
        "flags": [_(message) for message in q.comparison.flags],
        "charts": charts(measurements_of(board, keys), _),
        "runs": [run_row(key, board.runs[key], _) for key in keys],
    }


def run(board: Board, key: str, _: Translator) -> dict[str, Any] | None:
    """Return the page of a run; None if there is no such run."""
    info = board.runs.get(key)
    if info is None:
        return None
    reader = info.reader
    problems: list[str] = []

    def read(load: Any) -> Any:
        try:
            return load()
        except (OelmError, OSError) as error:
            problems.append(str(error))
            return None

    config, audit, timing, manifest = (
        read(load) for load in (reader.config, reader.freeze_audit, reader.timing, reader.manifest)
    )
    folder = RunFolder(info.path)
    metrics = board.metrics(key)
    others = [other for other, r in board.runs.items() if r.study == info.study and other != key]
    return {
        "row": run_row(key, info, _),
        "status": info.status,
        "study": info.study,
        "path": str(info.path),
        "command": manifest.command if manifest else "",
        "log": tail(folder.log_file, LOG_LINES) or tail(info.path / CONSOLE, LOG_LINES),
        "audit": audit,
        "audits": [(when, record) for when, record in _audits(audit, _) if record is not None],
        "times": _timing(timing, _) if timing else [],
        "config": config_to_yaml(config) if config else "",
        "problems": [*problems, *([metrics.problem] if metrics.problem else [])],
        "charts": charts(measurements_of(board, [key]), _, more=_OF_RUNS),
        "others": others,
    }


def _audits(audit: Any, _: Translator) -> list[tuple[str, Any]]:
    return [(_("at the start"), audit.start), (_("at the end"), audit.end)] if audit else []


def _timing(timing: TimingStats, _: Translator) -> list[tuple[str, str]]:
    rows = [(_(name), duration(getattr(timing, field))) for field, name in _TIMES.items()]
    rows.append((_("peak memory"), numbers.size(timing.peak_memory_bytes)))
    if timing.tokens_per_second:
        rows.append((_("tokens per second"), f"{timing.tokens_per_second:,.0f}"))
    return rows


def duration(seconds: float | None) -> str:
    return f"{seconds:.3g} s" if seconds is not None and seconds < 10 else duration_text(seconds)


def compare(board: Board, a: str, b: str, _: Translator) -> dict[str, Any]:
    """Return the page that compares the runs `a` and `b`; if one is unknown, only the form to choose runs."""
    runs = board.runs
    chosen = [(key, runs[key]) for key in (a, b) if key in runs]
    page: dict[str, Any] = {"keys": list(runs), "a": a, "b": b, "runs": [run_row(k, r, _) for k, r in chosen]}
    page |= {"differences": None, "charts": [], "problem": ""}
    if len(chosen) < 2:
        return page
    page["charts"] = charts(measurements_of(board, (a, b)), _, more=_OF_RUNS)
    try:
        left, right = (info.reader.config() for _key, info in chosen)
    except (OelmError, OSError) as error:
        return page | {"problem": str(error)}
    page["differences"] = [(name, str(x), str(y)) for name, (x, y) in config_diff(left, right).items()]
    return page
