"""Arms against their references, from run folders alone.

Questions, kept apart:
  baseline        what does the method cost or bring against the arm it is measured by?
  control         what does freezing alone cost, against the same architecture with trained Q/K?
  orthogonality   do orthonormal rows beat Gaussian rows of the same scale, both frozen alike?
  start           is it below the same network without its extras, trained from an orthonormal start?
  plain           and below the plainer architecture that its baseline is itself measured by?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from oelm.analysis import guards
from oelm.analysis.load import FINISHED, Loaded, LoadedRun
from oelm.analysis.messages import Message
from oelm.analysis.statistics import (
    Estimate,
    binomial_se,
    difference,
    example_se,
    interaction_se,
    mcnemar,
)
from oelm.analysis.verdict import (
    ACCURACY_SIGN,
    ACCURACY_TARGET,
    PPL_SIGN,
    PPL_TARGET,
    REFUSED,
    SCENARIO,
    Verdict,
    decide,
)
from oelm.config.run_config import RunConfig
from oelm.data.synthetic.recall import RECALL_TASKS
from oelm.methods.method import Method
from oelm.methods.presets import find_method

Kind = Literal["baseline", "control", "orthogonality", "init", "plain"]
TRAINED_INIT = "orthogonal-init"
TestError = Literal["predictions", "binomial", "none"]
Planned = Mapping[str, Mapping[str, RunConfig]]  # experiment ID -> scale -> config as catalogued


@dataclass(frozen=True, eq=False)
class Arm:
    """All runs of one experiment at one scale, one per seed."""

    runs: tuple[LoadedRun, ...]
    planned: Mapping[str, RunConfig]  # scale -> config as catalogued; empty if the experiment is not

    @property
    def config(self) -> RunConfig:
        return self.runs[0].config

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def name(self) -> str:
        return self.runs[0].arm

    @property
    def method(self) -> Method:
        return self.config.method

    @cached_property
    def finished(self) -> tuple[LoadedRun, ...]:
        """Runs with a test figure, by seed."""
        done = [r for r in self.runs if r.state == FINISHED and r.result and r.result.test is not None]
        return tuple(sorted(done, key=lambda r: r.seed))

    @property
    def diverged(self) -> tuple[LoadedRun, ...]:
        return tuple(r for r in self.runs if r.state == guards.DIVERGED)

    @property
    def metric(self) -> str:
        return self.finished[0].result.metric if self.finished and self.finished[0].result else ""

    @property
    def scores(self) -> dict[int, float]:
        """Seed -> perplexity, or accuracy as a share."""
        return {r.seed: r.result.test for r in self.finished if r.result and r.result.test is not None}

    @property
    def mean(self) -> float:
        """Over seeds: geometric for perplexity, so that it agrees with the ratio; of finished arms only."""
        return self._mean_of(list(self.scores.values()))

    @property
    def probes(self) -> bool:
        """Whether its text is a generated task: a question of why, not a corpus that a claim is about."""
        return self.config.data.dataset in RECALL_TASKS

    @property
    def validation(self) -> float | None:
        """The mean that `mean` is of test, of the best step's validation; None where a run lacks it."""
        values = [r.result.validation for r in self.finished if r.result]
        known = [v for v in values if v is not None]
        return self._mean_of(known) if known and len(known) == len(values) else None

    def _mean_of(self, values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(values))) if self.metric == "ppl" else np.mean(values))

    @property
    def test_rows(self) -> str:
        """Fingerprint of the rows it was tested on; "" when the manifest does not say."""
        data = self.finished[0].manifest.get("data") if self.finished else None
        prints = data.get("fingerprints") if isinstance(data, dict) else None
        return str(prints.get("test") or "") if isinstance(prints, dict) else ""

    @property
    def dataset_name(self) -> str:
        """The dataset of its full-scale experiment; a smaller scale may use another one in its place."""
        return self.planned.get("full", self.config).data.dataset

    @property
    def freezes(self) -> bool:
        return any(r.result.parameters.frozen > 0 for r in self.finished if r.result)

    @property
    def group(self) -> str:
        """Name of what it is compared within, with its dataset: two studies may use the same one."""
        dataset = self.config.data.dataset
        group = self.config.compare.group or f"{self.config.study}/{dataset}"
        said = dataset in group or group.rpartition("/")[2] in dataset
        return group if said else f"{group}, {dataset}"

    @property
    def place(self) -> tuple[str, str, str]:
        """Where it can be compared: study, scale, group."""
        return self.config.study, self.config.scale, self.config.compare.group

    @property
    def key(self) -> tuple[str, str, str]:
        return self.config.study, self.config.scale, self.id


@dataclass(frozen=True, eq=False)
class Comparison:
    """One arm against one reference. `effect` is the log perplexity ratio or the difference in points of
    accuracy, `ratio` always the log ratio; both None when the comparison is refused."""

    kind: Kind
    arm: Arm
    reference: Arm
    effect: Estimate | None
    ratio: Estimate | None
    target: Verdict
    sign: Verdict
    scenario: Verdict | None  # phase 4's rule: classification with our GPT, against its baseline
    refused: tuple[Message, ...]
    flags: tuple[Message, ...]
    test_error: TestError = "none"
    mcnemar_p: float | None = None  # one seed on each side: whether the test set alone can tell them apart
    caveats: tuple[Message, ...] = ()  # why there are numbers but no verdict

    @property
    def metric(self) -> str:
        return self.arm.metric

    @property
    def group(self) -> str:
        return self.arm.group

    @property
    def dataset(self) -> str:
        return self.arm.config.data.dataset

    @property
    def runs(self) -> tuple[LoadedRun, ...]:
        return (*self.arm.finished, *self.reference.finished)


@dataclass(frozen=True)
class Comparisons:
    made: tuple[Comparison, ...]
    arms: tuple[Arm, ...]
    waiting: tuple[Message, ...]  # comparisons that are planned by the configs but lack finished runs

    def of(self, kind: Kind) -> list[Comparison]:
        return [c for c in self.made if c.kind == kind]


def compare_all(loaded: Loaded, planned: Planned) -> Comparisons:
    """Make every comparison that the configs in the run folders ask for."""
    arms = gather(loaded.runs, planned)
    index = {arm.key: arm for arm in arms}
    names = _names_of_rows(arms)
    made: list[Comparison] = []
    waiting: list[Message] = []
    for arm in arms:
        wanted: list[tuple[Kind, str]] = [("baseline", arm.config.compare.baseline)]
        if arm.config.compare.control not in ("", arm.config.compare.baseline):
            wanted.append(("control", arm.config.compare.control))
        for kind, name in wanted:
            if not name or name == arm.id:
                continue
            reference = _find(index, arm, name)
            if arm.finished and reference is not None and reference.finished:
                made.append(compare(kind, arm, reference, loaded.trials, names))
            else:
                missing = arm.id if not arm.finished else name
                waiting.append(
                    Message(
                        "{id} against {reference} ({scale}): waiting for finished runs of {missing}",
                        id=arm.id,
                        reference=name,
                        missing=missing,
                        scale=arm.config.scale,
                    )
                )
    for arm, twin in _orthogonality_pairs(arms):
        made.append(compare("orthogonality", arm, twin, loaded.trials, names))
    for kind, arm, reference in _further_references(arms, index):
        made.append(compare(kind, arm, reference, loaded.trials, names))
    return Comparisons(tuple(made), arms, tuple(waiting))


def _names_of_rows(arms: Iterable[Arm]) -> dict[str, list[str]]:
    """Fingerprint of test rows -> the dataset names under which they occur, where there are several."""
    found: dict[str, list[str]] = {}
    for arm in arms:
        if arm.test_rows and not arm.probes:
            names = found.setdefault(arm.test_rows, [])
            names.extend([arm.dataset_name] if arm.dataset_name not in names else [])
    return {rows: names for rows, names in found.items() if len(names) > 1}


def gather(runs: Iterable[LoadedRun], planned: Planned) -> tuple[Arm, ...]:
    found: dict[tuple[str, str, str], list[LoadedRun]] = {}
    for run in runs:
        found.setdefault((run.config.study, run.config.scale, run.id), []).append(run)
    arms = [
        Arm(tuple(sorted(rs, key=lambda r: r.seed)), planned.get(id, {})) for (_, _, id), rs in found.items()
    ]
    return tuple(sorted(arms, key=_reading_order))


def _reading_order(arm: Arm) -> tuple[Any, ...]:
    """Language models before classifiers, groups together, a baseline before what is measured against it."""
    config, compare = arm.config, arm.config.compare
    classifies = config.task == "classification"
    return config.study, config.scale, classifies, compare.group, bool(compare.baseline), arm.id


def _find(index: dict[tuple[str, str, str], Arm], arm: Arm, name: str) -> Arm | None:
    """The named experiment at the arm's scale: in its own study, else wherever it was run."""
    study, scale, _ = arm.key
    if (study, scale, name) in index:
        return index[study, scale, name]
    elsewhere = [a for (_, s, i), a in index.items() if (s, i) == (scale, name)]
    return elsewhere[0] if elsewhere else None


def _further_references(
    arms: Sequence[Arm], index: dict[tuple[str, str, str], Arm]
) -> Iterable[tuple[Kind, Arm, Arm]]:
    """What a frozen language model has to beat besides its baseline, for the claim that nothing is lost."""
    for arm in arms:
        if not arm.freezes or arm.metric != "ppl" or not arm.config.compare.control:
            continue
        named = arm.config.compare
        for other in arms:
            same = other.place == arm.place and other.config.model == arm.config.model
            start = other.method == find_method(TRAINED_INIT) and arm.method.control != TRAINED_INIT
            if same and start and other.finished:
                yield "init", arm, other
        baseline = _find(index, arm, named.baseline)
        plain = _find(index, arm, baseline.config.compare.baseline) if baseline is not None else None
        if plain is not None and plain.finished:
            yield "plain", arm, plain


def _orthogonality_pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Frozen orthonormal arms with the arm that differs in nothing but Gaussian rows of the same scale."""
    pairs = []
    for arm in arms:
        if arm.method.init != "headwise" or not arm.finished:
            continue
        for other in arms:
            same = other.place == arm.place and other.config.model == arm.config.model
            frozen = not arm.method.trains_qk
            if same and frozen and other.finished and _scale_matched(arm.method, other.method):
                pairs.append((arm, other))
    return pairs


def _scale_matched(orthogonal: Method, gaussian: Method) -> bool:
    """Same method but for the rows; with gain "match" any Gaussian has the scale, else only N(0, 1/d)."""
    matching = ("normal", "normal-matched") if orthogonal.gain == "match" else ("normal-matched",)
    return (
        gaussian.init in matching and replace(gaussian, init="headwise", name=orthogonal.name) == orthogonal
    )


def compare(
    kind: Kind,
    arm: Arm,
    reference: Arm,
    trials: Sequence[LoadedRun] = (),
    names: Mapping[str, Sequence[str]] | None = None,
) -> Comparison:
    """Two arms with finished runs. Refused comparisons carry no numbers, those with caveats no verdict.

    names: fingerprint of test rows -> dataset names, for rows that occur under several names
    """
    every = (*arm.runs, *reference.runs)
    flags = guards.flags(arm.finished, reference.finished, trials, every=every)
    refused = guards.refusals(arm.finished, reference.finished)
    if refused:
        no = Verdict("target", REFUSED)
        return Comparison(
            kind, arm, reference, None, None, no, replace(no, rule="sign"), None, refused, flags
        )
    perplexity = arm.metric == "ppl"
    effect, ratio, test_error, p = _perplexity(arm, reference) if perplexity else _accuracy(arm, reference)
    withhold = "diverged" if arm.diverged or reference.diverged else ""
    if at_chance(reference):
        withhold, flags = (
            "chance",
            (
                *flags,
                Message(
                    "{id} did not learn the task: its accuracy is no better than always predicting the most "
                    "frequent class",
                    id=reference.id,
                ),
            ),
        )
    others = [name for name in (names or {}).get(arm.test_rows, ()) if name != arm.dataset_name]
    plans = [a.planned.get(a.config.scale) for a in (arm, reference)]
    caveats = guards.caveats(arm.finished[0].config, reference.finished[0].config, plans, others)
    withhold = "caveat" if caveats else withhold
    scenario = None
    if not perplexity and arm.config.model.family == "gpt" and kind == "baseline" and arm.freezes:
        scenario = decide(SCENARIO, effect, withhold=withhold)
    return Comparison(
        kind,
        arm,
        reference,
        effect,
        ratio,
        decide(PPL_TARGET if perplexity else ACCURACY_TARGET, ratio, withhold=withhold),
        decide(PPL_SIGN if perplexity else ACCURACY_SIGN, ratio, withhold=withhold),
        scenario,
        (),
        (*flags, *_about_seeds(effect, test_error, perplexity)),
        test_error,
        p,
        caveats,
    )


def at_chance(arm: Arm) -> bool:
    """Whether a classifier is within two standard errors of always naming the most frequent class."""
    guessed = [r.most_frequent for r in arm.finished if r.most_frequent is not None]
    if not guessed:
        return False
    share, examples = guessed[0], min(r.result.test_n for r in arm.finished if r.result)
    return arm.mean < share + 2 * math.sqrt(share * (1 - share) / max(1, examples))


def _about_seeds(effect: Estimate, test_error: TestError, perplexity: bool) -> list[Message]:
    found = []
    if effect.interval_kind == "Welch":
        found.append(
            Message(
                "some seeds were run in one arm only ({seeds}): Welch's interval over all seeds is used "
                "instead of pairs",
                seeds=", ".join(map(str, effect.unpaired)),
            )
        )
    elif effect.unpaired:
        found.append(
            Message(
                "seeds that were run in one arm only are left out: {seeds}",
                seeds=", ".join(map(str, effect.unpaired)),
            )
        )
    if effect.interval_kind == "none":
        found.append(Message("n = 1: no confidence interval, so no verdict"))
    if not perplexity and test_error == "binomial":
        found.append(
            Message(
                "without predictions, the test-set error is estimated from unpaired binomial distributions, "
                "which is too wide"
            )
        )
    return found


def _perplexity(arm: Arm, reference: Arm) -> tuple[Estimate, Estimate, TestError, None]:
    """Only the seeds' error: run folders hold no loss per document."""
    logs = [{s: math.log(x) for s, x in a.scores.items()} for a in (arm, reference)]
    estimate = difference(*logs)
    return estimate, estimate, "none", None


def _accuracy(arm: Arm, reference: Arm) -> tuple[Estimate, Estimate, TestError, float | None]:
    points = [{s: 100 * x for s, x in a.scores.items()} for a in (arm, reference)]
    # No model is right never; half an example keeps the logarithm of a total failure finite.
    floor = 0.5 / max(1, *(r.result.test_n for r in arm.finished if r.result))
    logs = [{s: math.log(max(x, floor)) for s, x in a.scores.items()} for a in (arm, reference)]
    used = difference(*points)
    seeds_a, seeds_b = _used_seeds(arm, reference, used)
    a, b = _hits(arm, seeds_a), _hits(reference, seeds_b)
    if a is None or b is None or a.shape[1] != b.shape[1]:
        accuracy, base = (float(np.mean(list(x.scores.values()))) for x in (arm, reference))
        examples = min((r.result.test_n for r in (*arm.finished, *reference.finished) if r.result), default=0)
        if examples == 0:
            return used, difference(*logs), "none", None
        se = binomial_se(accuracy, base, examples)
        relative = math.hypot(
            math.sqrt(accuracy * (1 - accuracy) / examples) / max(accuracy, floor),
            math.sqrt(base * (1 - base) / examples) / max(base, floor),
        )
        return difference(*points, test_se=100 * se), difference(*logs, test_se=relative), "binomial", None
    paired = used.interval_kind != "Welch" and seeds_a == seeds_b
    # d log(accuracy) = d accuracy / accuracy, example by example.
    scaled_a, scaled_b = a / max(float(a.mean()), floor), b / max(float(b.mean()), floor)
    blocks = (a - b,) if paired else (a, -b)
    scaled = (scaled_a - scaled_b,) if paired else (scaled_a, -scaled_b)
    p = mcnemar(a[0], b[0]) if len(a) == len(b) == 1 else None
    effect = difference(
        *points, test_se=100 * example_se(*blocks), interaction_se=100 * interaction_se(*blocks)
    )
    ratio = difference(*logs, test_se=example_se(*scaled), interaction_se=interaction_se(*scaled))
    return effect, ratio, "predictions", p


def _used_seeds(arm: Arm, reference: Arm, estimate: Estimate) -> tuple[list[int], list[int]]:
    """The seeds `difference` used on each side."""
    if estimate.interval_kind == "Welch":
        return sorted(arm.scores), sorted(reference.scores)
    shared = sorted(arm.scores.keys() & reference.scores.keys())
    return (shared, shared) if shared else (sorted(arm.scores), sorted(reference.scores))


def _hits(arm: Arm, seeds: Iterable[int]) -> np.ndarray | None:
    """(seeds, examples) of 0/1; None when a run's predictions are missing or of another length."""
    chosen = set(seeds)
    rows = [r.hits for r in arm.finished if r.seed in chosen]
    if any(h is None for h in rows) or len({len(h) for h in rows if h is not None}) != 1:
        return None
    return np.stack([h for h in rows if h is not None])
