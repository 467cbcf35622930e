"""Decide when a comparison is refused, and when it gets no verdict.

A comparison is refused if the arms differ in data, tokenizer, budget or evaluation set, because their scores
are not comparable. A comparison has a caveat if the scores are comparable but a verdict would mislead. Such a
comparison shows only the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oelm.analysis.arms import Arm
from oelm.analysis.messages import Message
from oelm.config.diff import config_diff
from oelm.config.run_config import RunConfig
from oelm.data.catalogue import datasets

# Values that the runs recorded in results.json and that must be equal in both arms: the metric, and the
# fields of `fairness`.
RECORDED = {
    "metric": Message("the metric"),
    "data": Message("the training data"),
    "tokenizer": Message("the tokenizer"),
    "eval_set": Message("the evaluation set"),
    "batch_rows": Message("the batch size"),
    "steps": Message("the number of steps"),
    "schedule": Message("the learning-rate schedule"),
}
# Settings of the config that must be equal in both arms.
EQUAL_SETTINGS = {
    "task", "scale", "data.dataset", "data.variant", "data.tokenizer", "data.max_length", "data.train_rows",
    "data.eval_rows", "budget.steps", "budget.epochs", "optim.schedule", "optim.warmup_steps",
    "optim.warmup_share", "optim.final_lr_share",
}  # fmt: skip
# Settings of the config that `setting_differences()` ignores: arms may differ in them, or another function of
# this module compares them.
FREE_SETTINGS = (
    "id", "study", "seed", "method", "compare", "tune", "optim.lr", "data.source",
    "budget.batch_size", "budget.accumulation", "budget.log_every", "budget.checkpoint_every",
)  # fmt: skip
BUDGET_SETTINGS = (
    "budget.steps", "budget.epochs", "budget.batch_size", "budget.accumulation",
    "data.train_rows", "data.max_length",
)  # fmt: skip


def refusals(arm: Arm, reference: Arm) -> tuple[Message, ...]:
    """Return why the finished runs of two arms must not be compared; () if they may be compared."""
    return (
        *mixed_settings(arm),
        *mixed_settings(reference),
        *different_records(arm, reference),
        *different_settings(arm, reference),
    )


def mixed_settings(arm: Arm) -> list[Message]:
    """Return a refusal if the seeds of an arm were trained with different settings."""
    first = arm.finished[0]
    for run in arm.finished[1:]:
        if replace(run.config, seed=first.seed) == first.config:
            continue
        differing = config_diff(replace(first.config, seed=0), replace(run.config, seed=0))
        if differing:
            fields = ", ".join(f"{name} ({x} / {y})" for name, (x, y) in differing.items())
            return [
                Message(
                    "the seeds of {id} have different settings: seeds {a} and {b} differ in {fields}",
                    id=arm.id,
                    a=first.seed,
                    b=run.seed,
                    fields=fields,
                )
            ]
    return []


def different_questions(arm: Arm) -> tuple[Message, ...]:
    """Return a refusal if the runs of an arm were started with different questions of a study file."""
    asked = arm.config.compare.questions
    others = tuple(str(r.seed) for r in arm.runs if r.config.compare.questions != asked)
    if not others:
        return ()
    return (
        Message(
            "the questions about {id} were changed between its runs: seeds {seeds} were started with others",
            id=arm.id,
            seeds=others,
        ),
    )


def different_records(arm: Arm, reference: Arm) -> list[Message]:
    """Return a refusal for each difference in the data, tokenizer, evaluation set or budget of the runs."""
    found = []
    for name, what in RECORDED.items():
        mine, theirs = recorded(arm, name), recorded(reference, name)
        if mine != theirs or len(mine) > 1:
            found.append(
                Message(
                    "{what} differs: {arm} against {reference}",
                    what=what,
                    arm=_shortened(mine),
                    reference=_shortened(theirs),
                )
            )
    return found


def different_settings(arm: Arm, reference: Arm) -> list[Message]:
    """Return a refusal for each difference in the configs' data, context length, budget or schedule."""
    return [
        Message("{what} differs: {arm} against {reference}", what=name, arm=mine, reference=theirs)
        for name, (mine, theirs) in setting_differences(arm, reference).items()
        if name in EQUAL_SETTINGS
    ]


def caveats(arm: Arm, reference: Arm, same_rows: Sequence[str] = ()) -> tuple[Message, ...]:
    """Return why a comparison gets no verdict although its difference is shown; () if it gets a verdict.

    same_rows: names of other datasets in this analysis that have the same test rows
    """
    found = [
        *unequal_tuning(arm, reference),
        *other_budget(arm),
        *other_budget(reference),
        *builtin_text(arm, reference),
        *different_precision(arm, reference),
    ]
    if same_rows:
        found.append(Message("the test rows are the same as those of {others}", others=tuple(same_rows)))
    return tuple(dict.fromkeys(found))


def unequal_tuning(arm: Arm, reference: Arm) -> list[Message]:
    """Return a caveat if the learning rates were tuned differently, or differ without tuning."""
    a, b = arm.config, reference.config
    if a.tune.grid != b.tune.grid or a.tune.seeds != b.tune.seeds:
        return [
            Message(
                "not a fair comparison (unequal tuning: {arm}; {reference})",
                arm=_tuning_text(a),
                reference=_tuning_text(b),
            )
        ]
    if not a.tune.grid and a.optim.lr != b.optim.lr:
        return [
            Message(
                "not a fair comparison (the learning rates are {arm} and {reference}, and neither was tuned)",
                arm=f"{a.optim.lr:g}",
                reference=f"{b.optim.lr:g}",
            )
        ]
    return []


def other_budget(arm: Arm) -> list[Message]:
    """Return a caveat if an experiment was run with a different budget than it has in the catalogue."""
    config = arm.config
    planned = arm.planned.get(config.scale)
    differing = config_diff(config, planned) if planned else {}
    fields = [f"{n} {differing[n][0]}, not {differing[n][1]}" for n in BUDGET_SETTINGS if n in differing]
    if not fields:
        return []
    return [
        Message(
            "the budget of {id} differs from the catalogue ({fields})", id=arm.id, fields=", ".join(fields)
        )
    ]


def builtin_text(arm: Arm, reference: Arm) -> list[Message]:
    """Return a caveat if built-in generated text was used in place of a real dataset."""
    for config in (arm.config, reference.config):
        entry = datasets().get(config.data.dataset)
        if config.data.source == "builtin" and entry is not None and not entry.builtin:
            return [
                Message("built-in generated text was used instead of {dataset}", dataset=config.data.dataset)
            ]
    return []


def different_precision(arm: Arm, reference: Arm) -> list[Message]:
    """Return a caveat if the arms, or two runs of one seed, trained with different precision."""
    formats = [{run.seed: run.manifest.precision.dtype for run in a.finished} for a in (arm, reference)]
    mine, theirs = (set(by_seed.values()) - {""} for by_seed in formats)
    if not mine or not theirs:
        return []
    if mine == theirs:
        found = {seed: (formats[0][seed], formats[1][seed]) for seed in formats[0].keys() & formats[1].keys()}
        differing = tuple(str(s) for s, (a, b) in sorted(found.items()) if a != b and a and b)
        said = Message("the two runs of a seed differ in precision: seed {seeds}", seeds=differing)
        return [said] if differing else []
    return [
        Message(
            "the precision differs: {arm} against {reference}",
            arm=_shortened(mine),
            reference=_shortened(theirs),
        )
    ]


def datasets_by_test_rows(arms: Iterable[Arm]) -> Mapping[str, Iterable[str]]:
    """Return {hash of the test data: names of the datasets with this test data}."""
    names: dict[str, dict[str, None]] = {}
    for arm in arms:
        if arm.test_rows and not arm.probes:
            names.setdefault(arm.test_rows, {})[arm.dataset_name] = None
    return names


def other_names(arm: Arm, names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of other datasets with the test rows of this arm.

    names: the result of `datasets_by_test_rows()`
    """
    return [name for name in names.get(arm.test_rows, ()) if name != arm.dataset_name]


def undecidable(arm: Arm, reference: Arm) -> str:
    """Return why the confidence interval must not lead to a verdict: "chance" or "diverged"; "" if it may.

    "chance": the reference is no better than guessing, so it learned nothing that freezing could lose
    "diverged": a run diverged, so it has no score, and the estimated difference leaves this bad result out
    """
    if at_chance(reference):
        return "chance"
    return "diverged" if arm.diverged or reference.diverged else ""


def at_chance(arm: Arm) -> bool:
    """Return whether a classifier is no better than always predicting the most frequent class.

    The classifier counts as better if its mean accuracy is at least two standard errors above the accuracy of
    that prediction.
    """
    shares = [r.most_frequent for r in arm.finished if r.most_frequent is not None]
    if not shares:
        return False
    chance, examples = shares[0], min(r.test_n for r in arm.results)
    return arm.mean < chance + 2 * math.sqrt(chance * (1 - chance) / max(1, examples))


def recorded(arm: Arm, name: str) -> set[str]:
    """Return the distinct values that the finished runs of an arm recorded for `name`; "" if it is missing.

    name: a key of `RECORDED`
    """
    return {str((r.metric if name == "metric" else getattr(r.fairness, name)) or "") for r in arm.results}


def setting_differences(arm: Arm, reference: Arm) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which the configs of two arms differ, as name -> (arm, reference).

    The settings in `FREE_SETTINGS` are left out.
    """
    return {
        name: values
        for name, values in config_diff(arm.finished[0].config, reference.finished[0].config).items()
        if not any(name == free or name.startswith(free + ".") for free in FREE_SETTINGS)
    }


def _tuning_text(config: RunConfig) -> Message:
    if not config.tune.grid:
        return Message("learning rate {lr}, not tuned", lr=f"{config.optim.lr:g}")
    return Message(
        "learning rate {lr}, chosen from {grid} with {seeds} seed(s)",
        lr=f"{config.optim.lr:g}",
        grid=", ".join(f"{lr:g}" for lr in config.tune.grid),
        seeds=max(1, len(config.tune.seeds)),
    )


def _shortened(values: set[str]) -> str:
    """Return recorded values as one text for display; long values (hashes) are cut to 12 characters."""
    return " | ".join(v if len(v) <= 24 else v[:12] + "…" for v in sorted(values)) or "-"
