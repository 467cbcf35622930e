"""What forbids a comparison, and what a reader of it must know.

A refusal: the two arms did not answer the same question (data, tokenizer, budget, evaluation set). A flag:
they did, but something speaks for one side. Both name the field and the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from oelm.analysis.load import FAIRNESS, FINISHED, LoadedRun
from oelm.analysis.messages import Message, state_name
from oelm.config.diff import config_diff
from oelm.config.run_config import RunConfig
from oelm.data.catalogue import datasets

DIVERGED = "diverged"

# Facts of a run that must be equal in both arms: the metric, and the fields of `fairness` in results.json.
RECORDED = {
    "metric": Message("the metric"),
    "data": Message("the training data"),
    "tokenizer": Message("the tokenizer"),
    "eval_set": Message("the evaluation set"),
    "batch_rows": Message("the batch size"),
    "steps": Message("the number of steps"),
    "schedule": Message("the learning-rate schedule"),
}

# Fields of the config that make another question of it. Steps, rows and schedule are judged by what was
# really done (`fairness` in results.json) as well.
_QUESTION = {
    "task",
    "scale",
    "data.dataset",
    "data.variant",
    "data.tokenizer",
    "data.max_length",
    "data.train_rows",
    "data.eval_rows",
    "budget.steps",
    "budget.epochs",
    "optim.schedule",
    "optim.warmup_steps",
    "optim.warmup_share",
    "optim.final_lr_share",
}
# What the arms are meant to differ in, or what is judged elsewhere.
_EXPECTED = (
    "id", "study", "seed", "method", "compare", "tune", "optim.lr", "data.source",
    "budget.batch_size", "budget.accumulation", "budget.log_every", "budget.checkpoint_every",
)  # fmt: skip


def refusals(arm: Sequence[LoadedRun], reference: Sequence[LoadedRun]) -> tuple[Message, ...]:
    """Why these finished runs must not be compared; empty when they may."""
    found: list[Message] = []
    for runs in (arm, reference):
        found.extend(_mixed(runs))
    for name in ("metric", *FAIRNESS):
        mine, theirs = _values(arm, name), _values(reference, name)
        if mine != theirs or len(mine) > 1:
            found.append(
                Message(
                    "{what} differs: {arm} against {reference}",
                    what=RECORDED[name],
                    arm=_short(mine),
                    reference=_short(theirs),
                )
            )
    for name, (a, b) in _config_differences(arm[0].config, reference[0].config).items():
        if name in _QUESTION:
            found.append(Message("{what} differs: {arm} against {reference}", what=name, arm=a, reference=b))
    return tuple(found)


# What a budget is, for `caveats`.
_BUDGET = (
    "budget.steps", "budget.epochs", "budget.batch_size", "budget.accumulation",
    "data.train_rows", "data.max_length",
)  # fmt: skip


def caveats(
    a: RunConfig, b: RunConfig, planned: Sequence[RunConfig | None], same_rows: Sequence[str] = ()
) -> tuple[Message, ...]:
    """Why a comparison of two arms, given by their configs, gets no verdict although its numbers are shown.

    planned: the catalogued config of each arm at its scale; None for an experiment that is not catalogued
    same_rows: other dataset names under which the same test rows occur in this analysis
    """
    found = _unequal_rates(a, b)
    for config, plan in zip((a, b), planned, strict=True):
        if plan is not None and (unusual := _unusual_budget(config, plan)):
            found.append(
                Message(
                    "the budget of {id} differs from the catalogue ({fields})", id=config.id, fields=unusual
                )
            )
    if any(stands_in(c) for c in (a, b)):
        found.append(Message("built-in generated text instead of {dataset}", dataset=a.data.dataset))
    if same_rows:
        found.append(Message("the same test rows as {others}", others=tuple(same_rows)))
    return tuple(dict.fromkeys(found))


def stands_in(config: RunConfig) -> bool:
    """Whether built-in text was used under the name of a real dataset."""
    entry = datasets().get(config.data.dataset)
    return config.data.source == "builtin" and entry is not None and not entry.builtin


def _unequal_rates(a: RunConfig, b: RunConfig) -> list[Message]:
    if a.tune.grid != b.tune.grid or a.tune.seeds != b.tune.seeds:
        return [
            Message(
                "not a fair comparison (unequal tuning: {arm}; {reference})",
                arm=_tuned(a),
                reference=_tuned(b),
            )
        ]
    if not a.tune.grid and a.optim.lr != b.optim.lr:
        return [
            Message(
                "not a fair comparison (learning rates {arm} and {reference}, neither tuned)",
                arm=f"{a.optim.lr:g}",
                reference=f"{b.optim.lr:g}",
            )
        ]
    return []


def _unusual_budget(config: RunConfig, planned: RunConfig) -> str:
    """The fields in which the budget differs from the catalogued one, in words; "" if none does."""
    differing = config_diff(config, planned)
    return ", ".join(f"{n} {differing[n][0]}, not {differing[n][1]}" for n in _BUDGET if n in differing)


def _values(runs: Iterable[LoadedRun], name: str) -> set[str]:
    results = [r.result for r in runs if r.result]
    if name == "metric":
        return {r.metric for r in results}
    return {str(r.fairness.get(name)) for r in results}


def _short(values: set[str]) -> str:
    return " | ".join(v if len(v) <= 24 else v[:12] + "…" for v in sorted(values)) or "-"


def _mixed(runs: Sequence[LoadedRun]) -> list[Message]:
    """Seeds of one arm that were run with different settings are not one arm."""
    first = runs[0]
    for run in runs[1:]:
        differing = config_diff(replace(first.config, seed=0), replace(run.config, seed=0))
        if differing:
            return [
                Message(
                    "the seeds of {id} have different settings: seeds {a} and {b} differ in {fields}",
                    id=first.id,
                    a=first.seed,
                    b=run.seed,
                    fields=", ".join(f"{n} ({x} / {y})" for n, (x, y) in differing.items()),
                )
            ]
    return []


def _config_differences(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    return {
        name: pair
        for name, pair in config_diff(a, b).items()
        if not any(name == e or name.startswith(e + ".") for e in _EXPECTED)
    }


def flags(
    arm: Sequence[LoadedRun],
    reference: Sequence[LoadedRun],
    trials: Sequence[LoadedRun],
    *,
    every: Sequence[LoadedRun],
) -> tuple[Message, ...]:
    """What speaks against taking the comparison at face value. `every` holds all runs of both arms,
    finished or not; `arm` and `reference` the finished ones."""
    found = [*_states(every), *_selection([*arm, *reference], trials), *_audits(arm)]
    a, b = arm[0].config, reference[0].config
    found.extend(_tuning(a, b, trials))
    for name, (x, y) in _config_differences(a, b).items():
        if name in _QUESTION:
            continue
        if name.startswith("model."):
            found.append(
                Message(
                    "different architecture, {field}: {arm} against {reference}; architecture gains are not "
                    "attributed to freezing",
                    field=name,
                    arm=x,
                    reference=y,
                )
            )
        else:
            found.append(
                Message(
                    "different setting, {field}: {arm} against {reference}", field=name, arm=x, reference=y
                )
            )
    unknown = [n for n in FAIRNESS if _values(arm, n) == {"None"} == _values(reference, n)]
    if unknown:
        found.append(
            Message(
                "not checked, because neither arm recorded it: {fields}",
                fields=tuple(RECORDED[n] for n in unknown),
            )
        )
    found.extend(_identical(arm, reference))
    return tuple(dict.fromkeys(found))


def _states(every: Sequence[LoadedRun]) -> list[Message]:
    found = []
    diverged = [r for r in every if r.state == DIVERGED]
    unfinished = [r for r in every if r.state not in (FINISHED, DIVERGED)]
    if diverged:
        found.append(
            Message(
                "{n} runs diverged and are not in the mean, so there is no verdict: {runs}",
                n=len(diverged),
                runs=_named(diverged),
            )
        )
    if unfinished:
        found.append(
            Message(
                "{n} runs are not finished: {runs}", n=len(unfinished), runs=_named(unfinished, state=True)
            )
        )
    return found


def _named(runs: Iterable[LoadedRun], state: bool = False) -> tuple[Message, ...]:
    return tuple(
        Message("{id} seed {seed} ({state})", id=r.id, seed=r.seed, state=state_name(r.state))
        if state
        else Message("{id} seed {seed}", id=r.id, seed=r.seed)
        for r in runs
    )


def _selection(runs: Sequence[LoadedRun], trials: Sequence[LoadedRun]) -> list[Message]:
    """Was anything chosen by the figure that is reported?"""
    found = []
    ids = {r.id for r in runs}
    peeked = [t for t in trials if t.id in ids and t.result and t.result.test is not None]
    if peeked:
        found.append(
            Message(
                "tuning trials were evaluated on the test split, so it may have influenced the choice of the "
                "learning rate: {runs}",
                runs=_named(peeked),
            )
        )
    judged = []
    for run in runs:
        prints = run.manifest.get("data", {})
        prints = prints.get("fingerprints", {}) if isinstance(prints, dict) else {}
        held_out = prints.get("validation") if isinstance(prints, dict) else None
        if run.result and held_out and held_out == run.result.fairness.get("eval_set"):
            judged.append(run)
    if judged:
        found.append(
            Message(
                "the checkpoint was selected on the reported split, so its score is too optimistic: {runs}",
                runs=_named(judged),
            )
        )
    return found


def _audits(arm: Sequence[LoadedRun]) -> list[Message]:
    failed = [r for r in arm if not r.audited]
    return [Message("the freeze audit failed: {runs}", runs=_named(failed))] if failed else []


def _tuning(a: RunConfig, b: RunConfig, trials: Sequence[LoadedRun]) -> list[Message]:
    found = []
    if not a.tune.grid and not b.tune.grid and a.optim.lr == b.optim.lr:
        found.append(
            Message("the learning rate was not tuned for either arm ({lr} for both)", lr=f"{a.optim.lr:g}")
        )
    for config in (a, b):
        if not config.tune.grid:
            continue
        edges = (min(config.tune.grid), max(config.tune.grid))
        if len(config.tune.grid) > 2 and config.optim.lr in edges:
            found.append(
                Message(
                    "the learning rate of {id} ({lr}) is at the edge of its grid; a better one may lie "
                    "outside",
                    id=config.id,
                    lr=f"{config.optim.lr:g}",
                )
            )
        place = (config.study, config.id, config.scale)
        own = [t for t in trials if (t.config.study, t.id, t.config.scale) == place]
        have = sum(1 for t in own if t.result or t.state == DIVERGED)  # a rate that diverges is an answer
        promised = len(config.tune.grid) * max(1, len(config.tune.seeds))
        if have < promised:
            found.append(
                Message(
                    "{id}: only {have} of {promised} tuning trials are in this runs folder",
                    id=config.id,
                    have=have,
                    promised=promised,
                )
            )
    return found


def _tuned(config: RunConfig) -> Message:
    if not config.tune.grid:
        return Message("learning rate {lr}, not tuned", lr=f"{config.optim.lr:g}")
    grid = ", ".join(f"{lr:g}" for lr in config.tune.grid)
    return Message(
        "learning rate {lr}, chosen from {grid} with {seeds} seed(s)",
        lr=f"{config.optim.lr:g}",
        grid=grid,
        seeds=max(1, len(config.tune.seeds)),
    )


def _identical(arm: Sequence[LoadedRun], reference: Sequence[LoadedRun]) -> list[Message]:
    """Seeds that agree to the last bit are one run copied, or a seed that reaches nothing."""
    return [
        Message(
            "all {n} seeds of {id} have exactly the same result: the seed seems to have no effect",
            id=runs[0].id,
            n=len(runs),
        )
        for runs in (arm, reference)
        if len(runs) > 1 and runs[0].result and runs[0].result.metric == "ppl"
        if len({r.result.test for r in runs if r.result}) == 1
    ]
