"""Synthetic run folders with the files that the training loop writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from oelm.analysis import analyze as analysis
from oelm.analysis.compare import Comparison
from oelm.config.run_config import (
    BudgetConfig,
    CompareConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TuneConfig,
)
from oelm.experiments.catalogue import planned_configs
from oelm.methods.presets import find_method
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.schema import (
    AuditRecord,
    DataFacts,
    Fairness,
    FreezeAudit,
    Manifest,
    MetricsRow,
    ParameterCounts,
    Predictions,
    Results,
    Scores,
    Status,
    TestLosses,
    TimingStats,
    TokenizerFacts,
)

planned = cache(planned_configs)
BASE = "GPT-01"
FROZEN_PPL, BASE_PPL = (8.5, 8.8, 8.6), (8.0, 8.1, 8.2)  # of three seeds
QK, TOTAL = 12_288, 200_000


def analyze(root: Path | str, studies: Sequence[str] = (), **options: Any) -> analysis.Analysis:
    """Analyze a runs folder with the catalogue of the package."""
    return analysis.analyze(root, studies, planned=planned(), **options)


def lm_config(id: str = BASE, arm: str = "baseline", *, seed: int = 0, **changes: Any) -> RunConfig:
    """A language-modelling run of the group GPT/tinystories, measured against GPT-01."""
    baseline = "" if id == BASE else BASE
    config = RunConfig(
        id=id,
        study="paper",
        task="lm",
        data=DataConfig(dataset="tinystories", tokenizer="bpe-1024", max_length=128, source="local"),
        model=ModelConfig(family="gpt", name="mini", dropout=0.0),
        method=find_method(arm),
        optim=OptimConfig(lr=4e-3),
        budget=BudgetConfig(batch_size=4, steps=1200, eval_every=100),  # the catalogue's at mini scale
        compare=CompareConfig(group="GPT/tinystories", arm=arm, baseline=baseline, phase=2),
        tune=TuneConfig(grid=(2e-3, 4e-3, 8e-3), seeds=(0,)),
        scale="mini",
        seed=seed,
    )
    return replace(config, **changes)


def cls_config(id: str = "GPT-CLS-01", arm: str = "baseline", *, seed: int = 0, **changes: Any) -> RunConfig:
    config = lm_config(id, arm, seed=seed)
    return replace(
        config,
        task="classification",
        data=replace(config.data, dataset="imdb", train_rows=6000),
        budget=replace(config.budget, batch_size=16, steps=600, accumulation=2),
        model=replace(config.model, causal=False),
        compare=CompareConfig(
            group="GPT-CLS/imdb", arm=arm, baseline="" if id == "GPT-CLS-01" else "GPT-CLS-01", phase=4
        ),
        **changes,
    )


def write_run(
    root: Path,
    config: RunConfig,
    value: float = 8.0,
    *,
    state: str = "finished",
    hits: np.ndarray | None = None,
    documents: tuple[np.ndarray, np.ndarray] | None = None,
    fairness: dict[str, Any] | None = None,
    tokens: int = 1_000_000,
    attention: bool = False,
    audit_ok: bool = True,
    validation_print: str = "val",
    test: bool = True,
    rows: str = "",
) -> Path:
    """One run. `value` is the test perplexity or accuracy; `hits` the per-example 0/1 of a classifier.

    documents: tokens and summed losses of the test documents of a language model, which decide the perplexity
    """
    folder = RunFolder(run_path(root, config))
    folder.claim(config)
    metric = "accuracy" if config.task == "classification" else "ppl"
    if hits is not None:
        value = float(np.mean(hits))
    if documents is not None:
        value = math.exp(documents[1].sum() / documents[0].sum())
    folder.write(_manifest(config, tokens, validation_print, rows))
    folder.write(FreezeAudit(start=AuditRecord(), end=AuditRecord(ok=audit_ok)))
    _write_metrics(folder, config, attention)
    reached = 400 if state == "finished" else 150
    reason = "loss is NaN at step 150" if state == "diverged" else ""
    folder.write_status(
        Status(state=state, step=reached, total_steps=400, loss=2.0, host="test", reason=reason)
    )
    folder.close()
    if state != "finished":
        return folder.path
    frozen = 0 if config.method.trains_qk else QK
    n = int(documents[0].sum()) if documents is not None else 2000 if hits is None else len(hits)
    scores = Scores(loss=math.log(max(value, 1.01)), n=n, **{metric: value})
    saving = 0.05 if frozen else 0.0
    folder.write(TimingStats(60.0, mean_step_time=0.15, peak_memory_bytes=3 * 10**8, predicted_saving=saving))
    folder.write(
        Results.of(
            config,
            metric=metric,
            test=scores if test else None,
            validation=replace(scores, step=400),
            parameters=ParameterCounts(TOTAL, TOTAL - frozen, frozen, QK, QK - frozen),
            steps=400,
            tokens_seen=400 * 16 * 128,
            checkpoint_bytes=12 * TOTAL - 8 * frozen,
            stopped_early=False,
            fairness=replace(Fairness("d" * 64, "t" * 64, "e" * 64, 16, 400, "cosine"), **(fairness or {})),
        )
    )
    if hits is not None:
        labels = [0, 1] * (len(hits) // 2) + [0] * (len(hits) % 2)
        predicted = [y if h else 1 - y for y, h in zip(labels, hits, strict=True)]
        folder.write(Predictions(tuple(labels), tuple(predicted)))
    if documents is not None:
        folder.write(TestLosses(tuple(documents[0].tolist()), tuple(documents[1].round(3).tolist())))
    folder.write_checksums()
    return folder.path


def _write_metrics(folder: RunFolder, config: RunConfig, attention: bool) -> None:
    rows = [
        MetricsRow(s, "validation", {"loss": round(math.log(8) + 2 / (1 + s / 50) + config.seed * 0.01, 4)})
        for s in range(0, 401, 50)
    ]
    if attention:
        rows += [_attention(s, frozen=not config.method.trains_qk) for s in range(0, 401, 100)]
    text = "".join(json.dumps(row.to_json()) + "\n" for row in rows)
    folder.metrics_file.write_text(text, encoding="utf-8")


def write_arm(
    root: Path,
    dataset: str,
    arm: str,
    values: Sequence[float | np.ndarray],
    *,
    make: Callable[..., RunConfig] = lm_config,
    study: str = "X",
    pretrained: bool = False,
    **changes: Any,
) -> None:
    """A run per value, or row of hits, seeds from 0: <study>-<dataset>-<arm> in <study>/<dataset>."""
    for seed, value in enumerate(values):
        config = make(f"{study}-{dataset}-{arm}", arm, seed=seed)
        base = "" if arm == "baseline" else f"{study}-{dataset}-baseline"
        config = replace(
            config,
            study=study,
            data=replace(config.data, dataset=dataset),
            model=replace(config.model, pretrained=pretrained),
            compare=replace(config.compare, group=f"{study}/{dataset}", baseline=base),
        )
        if isinstance(value, np.ndarray):
            write_run(root, config, hits=value, **changes)
        else:
            write_run(root, config, value, **changes)


def write_trials(root: Path, config: RunConfig, **options: Any) -> None:
    """The learning-rate grid that the config says its rate was chosen from."""
    for lr in config.tune.grid:
        trial = replace(config, optim=replace(config.optim, lr=lr), tune=replace(config.tune, trial=True))
        write_run(root, trial, 0.8 if config.task == "classification" else 8.0, **{"test": False, **options})


def write_study(root: Path, *, attention: bool = False) -> Path:
    """A small study with every kind of comparison: fixed numbers, so that tables can be compared by eye."""
    ppl = {
        ("GPT-01", "baseline"): (8.00, 8.10, 7.95),
        ("GPT-02", "oelm-freeze"): (8.66, 8.71, 8.60),
        ("GPT-02M", "oelm-random-matched"): (8.70, 8.66, 8.62),
        ("GPT-03", "oelm-random"): (11.2, 11.9, 11.4),
        ("GPT-01O", "orthogonal-init"): (7.70, 7.72, 7.66),
        ("GPT-P", "oelm-plus"): (8.02, 8.15, 7.93),
    }
    for (id, arm), values in ppl.items():
        for seed, value in enumerate(values):
            config = lm_config(id, arm, seed=seed)
            if id not in ("GPT-01", "GPT-01O"):
                config = replace(config, compare=replace(config.compare, control="GPT-01O"))
            write_run(root, config, value, attention=attention)
            if seed == 0:
                write_trials(root, config)
    rng = np.random.default_rng(7)
    easy = rng.random(1000)
    for (id, arm), level in {("GPT-CLS-01", "baseline"): 0.84, ("GPT-CLS-02", "oelm-freeze"): 0.80}.items():
        for seed in range(3):
            config = cls_config(id, arm, seed=seed)
            hits = (easy + rng.normal(0, 0.03, 1000) < level + 0.003 * seed).astype(int)
            write_run(root, config, hits=hits, attention=attention)
            if seed == 0:
                write_trials(root, config)
    return root


def dump(path: Path, value: Any) -> None:
    """Write a file of a run and update the checksums, as if the run had written this content."""
    path.write_text(json.dumps(value), encoding="utf-8")
    RunFolder(path.parent).write_checksums()


def _manifest(config: RunConfig, tokens: int, validation_print: str, rows: str) -> Manifest:
    fingerprints = {
        "train": "d" * 64,
        "validation": validation_print,
        "test": rows or f"{config.data.dataset:e<64}",
    }
    return Manifest(
        config_hash="0" * 64,
        command=f"oelm train {config.id} --scale {config.scale} --seed {config.seed}",
        versions={"oelm": "0.1.0"},
        machine={"host": "test"},
        data=DataFacts("local folder data", config.data.dataset, fingerprints, tokens={"train": tokens}),
        tokenizer=TokenizerFacts(config.data.tokenizer, "t" * 64, 2048),
    )


def _attention(step: int, *, frozen: bool) -> MetricsRow:
    """Two layers of four heads, as the training loop logs them."""
    drift = 0.0 if frozen else step / 400
    layers = []
    for layer in range(2):
        heads = [round(2.0 - 0.2 * head - 0.3 * layer + step / 4000, 4) for head in range(4)]
        entry = {
            "layer": layer,
            "entropy": round(sum(heads) / 4, 4),
            "entropy_heads": heads,
            "logit_scale": 0.8 + drift,
        }
        if not frozen:
            entry |= {"off_orthogonal_q": 0.02 + 0.4 * drift, "off_orthogonal_k": 0.03 + 0.5 * drift}
        layers.append(entry)
    return MetricsRow(step, "attention", {"layers": layers})


def pair(
    root: Path,
    arm: Sequence[float] = FROZEN_PPL,
    base: Sequence[float] = BASE_PPL,
    *,
    change: Callable[[RunConfig], RunConfig] = lambda c: c,
    **options: Any,
) -> Comparison:
    """Write and compare three seeds of a frozen arm and its baseline; `change` alters the arm's config."""
    for seed, value in enumerate(base):
        write_run(root, lm_config(seed=seed), value)
    for seed, value in enumerate(arm):
        write_run(root, change(lm_config("GPT-02", "oelm-freeze", seed=seed)), value, **options)
    write_trials(root, lm_config(seed=0))
    write_trials(root, change(lm_config("GPT-02", "oelm-freeze", seed=0)))
    (comparison,) = analyze(root).comparisons.of("baseline")
    return comparison


def texts(messages: Iterable[object]) -> str:
    return " | ".join(map(str, messages))
