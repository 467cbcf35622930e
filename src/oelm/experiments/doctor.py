"""Preflight: everything that would stop a run hours in, looked at in minutes.

Machine, precision, disk, then for each planned experiment its data and labels, its tokenizer, and one real
training step with one evaluation in a folder that is thrown away.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from oelm.config.run_config import Machine, RunConfig
from oelm.errors import OelmError
from oelm.experiments.plan import estimate
from oelm.runs.folder import RunFolder
from oelm.units import bytes_text

Verdict = Literal["ok", "problem"]

_TRIAL_ROWS = 200  # of the training split; enough for a batch of any experiment
_TRIAL_EVAL_ROWS = 20
_DATA_REMEDY = (
    "name the folder of your datasets with --data-dir; without any, --scale smoke has built-in text"
)
_MEMORY_REMEDY = (
    "a smaller --set budget.batch_size with a larger budget.accumulation keeps the effective batch"
)
_OTHER_REMEDY = "the message names the place; `oelm show` prints the whole config"
_SPARE_BYTES = 2 * 2**30  # token files, logs and the system want some room too


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is, and what to do when it is not well."""

    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(
    planned: Sequence[tuple[RunConfig, int]], root: Path | str, machine: Machine
) -> Iterator[Finding]:
    """All findings, as they are made. `planned`: one config of each experiment, and how many runs of it
    there will be, tuning trials included."""
    yield from _software()
    yield from _hardware(machine)
    yield _writable(Path(root))
    if planned:
        needed = sum((estimate(config, root).disk_bytes or 0) * runs for config, runs in planned)
        yield _disk(Path(root), needed, sum(runs for _, runs in planned))
    configs = [config for config, _ in planned]
    checked: dict[tuple[str, str, str, int], Finding] = {}
    for config in configs:
        data = (config.data.dataset, config.data.variant, config.data.source, config.data.train_rows)
        if data not in checked:
            checked[data] = _data(config, machine)
            yield checked[data]
        if checked[data].verdict == "problem":
            yield Finding(config.id, "problem", "not tried: its data has a problem", "see above")
        else:
            yield _one_step(config, machine)


def _software() -> Iterator[Finding]:
    from oelm.training.logs.manifest import versions

    found = versions()
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    missing = [
        name for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy") if name not in found
    ]
    if missing:
        yield Finding(
            "software", "problem", f"missing: {', '.join(missing)}", "pip install -c constraints.txt -e ."
        )
    else:
        yield Finding("software", "ok", text)


def _hardware(machine: Machine) -> Iterator[Finding]:
    import torch

    from oelm.training.logs.manifest import machine_facts
    from oelm.training.precision import choose_precision

    facts = machine_facts()
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    memory = bytes_text(facts["memory_bytes"])
    yield Finding("machine", "ok", f"{facts['cores']} cores, {memory}, {gpus}")
    name = machine.device if machine.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        precision = choose_precision("auto", torch.device(name))
        yield Finding("precision", "ok", f"{precision.dtype} on {name}: {precision.reason}")
    except (OelmError, RuntimeError) as error:
        yield Finding("precision", "problem", str(error), "name a device that is there with --device")


def _writable(root: Path) -> Finding:
    place = root
    while not place.exists():
        place = place.parent
    if os.access(place, os.W_OK):
        return Finding("runs folder", "ok", str(root.resolve()))
    return Finding("runs folder", "problem", f"{place} cannot be written", "choose another with --runs")


def _disk(root: Path, needed: int, runs: int) -> Finding:
    place = root.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{runs} runs may take {bytes_text(needed)}, {bytes_text(free)} are free on {place}"
    if needed + _SPARE_BYTES > free:
        return Finding(
            "disk", "problem", text, "free some (`oelm clean`), or choose another disk with --runs"
        )
    return Finding("disk", "ok", text)


def _data(config: RunConfig, machine: Machine) -> Finding:
    """Every row of every split, labels included: a label of -1 is found here, not after the training."""
    from oelm.data.checks import check_corpus
    from oelm.data.sources.open import open_corpus

    subject = f"data {config.data.dataset}"
    try:
        corpus = open_corpus(
            config.data.dataset,
            variant=config.data.variant,
            source=config.data.source,
            data_dir=machine.data_dir or None,
            cache_dir=machine.cache_dir or None,
        ).limit(train=config.data.train_rows, validation=config.data.eval_rows, test=config.data.eval_rows)
        report = check_corpus(
            corpus,
            batch_size=config.budget.batch_size,
            skip_bad_rows=machine.skip_bad_rows,
        )
    except OelmError as error:
        return Finding(subject, "problem", error.problem, error.remedy or _DATA_REMEDY)
    rows = ", ".join(f"{split} {check.rows:,}" for split, check in report.splits.items())
    if not report.ok:
        return Finding(
            subject, "problem", "; ".join(report.errors), "mend the rows, or leave them out: --skip-bad-rows"
        )
    shared = str(report.duplicates).splitlines()  # no error: official splits share texts, too
    return Finding(subject, "ok", f"{rows} rows from {report.origin}", notes=(*shared, *report.warnings))


def _one_step(config: RunConfig, machine: Machine) -> Finding:
    """One step and one evaluation of the real experiment on a few of its rows."""
    from oelm.training.fit import fit

    small = replace(
        config,
        data=replace(
            config.data,
            train_rows=_at_most(config.data.train_rows, _TRIAL_ROWS),
            eval_rows=_at_most(config.data.eval_rows, _TRIAL_EVAL_ROWS),
        ),
        budget=replace(config.budget, steps=1, epochs=0, eval_every=1, log_every=1, checkpoint_every=0),
        tune=replace(config.tune, trial=True),  # no look at the test split
    )
    with tempfile.TemporaryDirectory(prefix="oelm-doctor-") as place:
        folder = RunFolder(Path(place) / "run")
        try:
            outcome = fit(small, folder.path, machine)
        except OelmError as error:
            return Finding(config.id, "problem", error.problem, error.remedy or _OTHER_REMEDY)
        except Exception as error:
            return Finding(config.id, "problem", f"{type(error).__name__}: {error}", _OTHER_REMEDY)
        if outcome.state != "finished":
            remedy = _MEMORY_REMEDY if outcome.state == "oom" else _OTHER_REMEDY
            return Finding(config.id, "problem", f"{outcome.state}: {outcome.reason}", remedy)
        results = folder.results() or {}
        loss = (results.get("validation") or {}).get("loss", math.nan)
        manifest = folder.manifest() or {}
        tokenizer = manifest.get("tokenizer", {})
        counts = results.get("parameters", {})
    text = (
        f"one step and one evaluation: validation loss {loss:.3f}, {counts.get('trainable', 0):,} of "
        f"{counts.get('total', 0):,} parameters train, tokenizer {tokenizer.get('name')} "
        f"({tokenizer.get('vocab_size'):,})"
    )
    return Finding(config.id, "ok", text)


def _at_most(rows: int, most: int) -> int:
    return min(rows, most) if rows else most
