"""How much results vary because the learning rate was chosen by a few tuning trials.

If the trials were repeated with new seeds, another learning rate might win. This is the model of a trial:

    loss(lr, seed) = mean(lr) + common(seed) + rest(lr, seed)

`common(seed)` shifts all learning rates of an arm alike, so it does not affect the choice. The standard
deviation of `rest` is pooled over all arms of a comparison that train the same model, because one arm has too
few trials to know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oelm.analysis.arms import Arm
    from oelm.analysis.load import LoadedRun

TrialLosses = Mapping[float, Sequence[float]]  # learning rate -> loss with each trial seed; inf = diverged

# Of the numerical integral in `choice_probabilities()`, in standard errors.
_MAX_DISTANCE = 12.0  # a learning rate whose loss is further above the best is never chosen
_TAIL = 8.0  # distance from the mean at which the normal distribution is practically 0
_STEP = 0.25


def trial_sd(arms: Iterable[TrialLosses]) -> float | None:
    """Return the standard deviation of `rest` (see above), pooled over arms.

    Returns None if no arm has two learning rates that were tried with two seeds.
    """
    squares, freedom = 0.0, 0
    for losses in arms:
        rows = list(compared(losses).values())
        if len(rows) < 2 or len(rows[0]) < 2:
            continue
        seeds = [fmean(column) for column in zip(*rows, strict=True)]
        centre = fmean(seeds)
        for row in rows:
            mean = fmean(row)
            squares += sum((x - mean - s + centre) ** 2 for x, s in zip(row, seeds, strict=True))
        freedom += (len(rows) - 1) * (len(seeds) - 1)
    return math.sqrt(squares / freedom) if freedom else None


def compared(losses: TrialLosses) -> dict[float, Sequence[float]]:
    """Return the learning rates that can be chosen: tried with every trial seed, and never diverged."""
    seeds = max((len(values) for values in losses.values()), default=0)
    return {lr: v for lr, v in losses.items() if len(v) == seeds and all(math.isfinite(x) for x in v)}


def choice_probabilities(losses: TrialLosses, sd: float) -> dict[float, float]:
    """Return how probable it is that each learning rate is chosen by new trials with new seeds.

    The measured mean losses are taken as the true ones.

    sd: standard deviation of a trial (`trial_sd()`)

    >>> chosen = choice_probabilities({1e-3: [2.0, 2.1], 2e-3: [2.0, 2.1], 4e-3: [3.0, 3.1]}, sd=0.01)
    >>> {lr: round(p, 3) for lr, p in chosen.items()}
    {0.001: 0.5, 0.002: 0.5, 0.004: 0.0}
    """
    tried = compared(losses)
    means = {lr: fmean(values) for lr, values in tried.items()}
    best = min(means.values())
    error = sd / math.sqrt(len(next(iter(tried.values()))))  # standard error of a mean loss
    if error == 0:
        ties = sum(mean == best for mean in means.values())
        return {lr: (mean == best) / ties for lr, mean in means.items()}
    places = {lr: d for lr, m in means.items() if (d := (m - best) / error) <= _MAX_DISTANCE}
    normal, weights = NormalDist(), dict.fromkeys(means, 0.0)
    # A learning rate is chosen if its new mean loss is x and those of all others are above x: sum over all x.
    for i in range(round((2 * _TAIL + _MAX_DISTANCE) / _STEP)):
        x = -_TAIL + i * _STEP
        above = {lr: 1 - normal.cdf(x - d) for lr, d in places.items()}
        for lr, d in places.items():
            others = math.prod(p for other, p in above.items() if other != lr)
            weights[lr] += normal.pdf(x - d) * others
    total = sum(weights.values())
    return {lr: weight / total for lr, weight in weights.items()}


def choice_sd(probabilities: Mapping[float, float], scores: Mapping[float, float]) -> float:
    """Return the standard deviation of a score over the learning rates that might have been chosen."""
    mean = sum(p * scores[lr] for lr, p in probabilities.items())
    return math.sqrt(sum(p * (scores[lr] - mean) ** 2 for lr, p in probabilities.items()))


def lr_choice_sd(arm: Arm, reference: Arm, trials: Sequence[LoadedRun]) -> float | None:
    """Return the standard deviation of the difference between two arms that comes from their learning rates.

    It is in the unit of the difference: log perplexity, or points of accuracy. It is measured on validation
    data, with the length of the trials. Returns None if the learning rates were not tuned, or if the trials
    cannot show how much they vary.
    """
    configs = [side.finished[0].config for side in (arm, reference)]
    tuning = configs[0].tune
    if len(tuning.seeds) < 2 or configs[1].tune != tuning:
        return None
    place = (configs[0].study, configs[0].scale, configs[0].compare.group)
    models = [c.model for c in configs]  # e.g. with rotary, not with learned position embeddings
    found: dict[str, dict[float, dict[int, LoadedRun]]] = {}
    for t in trials:
        c = t.config
        if (
            (c.study, c.scale, c.compare.group) == place
            and c.model in models
            and t.seed in tuning.seeds
            and c.optim.lr in tuning.grid
        ):
            found.setdefault(t.id, {}).setdefault(c.optim.lr, {})[t.seed] = t
    losses = {id: _losses(own, tuning.seeds) for id, own in found.items()}
    sd = trial_sd(losses.values())
    if sd is None:
        return None
    variance = 0.0
    for config in configs:
        own = losses.get(config.id, {})
        if config.optim.lr not in compared(own):
            return None
        scores = {lr: _score(found[config.id][lr].values()) for lr in compared(own)}
        variance += choice_sd(choice_probabilities(own, sd), scores) ** 2
    return math.sqrt(variance)


def _losses(trials: Mapping[float, Mapping[int, LoadedRun]], seeds: Sequence[int]) -> TrialLosses:
    """Return the validation losses of ended trials, in the order of `seeds`."""
    found: dict[float, list[float]] = {}
    for lr, by_seed in trials.items():
        ended = (by_seed[seed] for seed in seeds if seed in by_seed)
        found[lr] = [
            t.result.validation_loss if t.result else math.inf
            for t in ended
            if t.result or t.state == "diverged"
        ]
    return found


def _score(trials: Iterable[LoadedRun]) -> float:
    """Return the mean validation score of trials: log perplexity, or accuracy in per cent."""
    values = []
    for result in (t.result for t in trials if t.result is not None):
        accuracy = result.metric == "accuracy"
        values.append(100 * (result.validation or 0.0) if accuracy else result.validation_loss)
    return fmean(values)
