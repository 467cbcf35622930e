"""The checks of `oelm doctor`, which find in minutes the problems that would stop a run after hours.

`examine()` checks software, hardware, precision and disk space. For each planned experiment it then checks
the data, and runs one real training step and one evaluation in a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oelm.config.run_config import Machine, RunConfig
from oelm.errors import OelmError, install_extra
from oelm.experiments.plan import estimate
from oelm.experiments.request import ArmPlan
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.scan import state_of
from oelm.units import bytes_text

# Rows of a short test run. 200 training rows are enough for one batch of any experiment.
TRAIN_ROWS, EVAL_ROWS = 200, 20

_SPARE_BYTES = 2 * 2**30  # disk space that must stay free for token files, logs and the system
_DATA_REMEDY = "give the folder of your datasets with --data-dir, or use --scale smoke, which needs no data"
_MEMORY_REMEDY = (
    "lower budget.batch_size and raise budget.accumulation by the same factor (--set budget.batch_size=...), "
    "so that the effective batch size stays the same"
)
_OTHER_REMEDY = "correct the setting that the message names; `oelm show` prints the complete config"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str  # what was checked: "disk", "data xnli" or an experiment ID
    ok: bool
    text: str
    remedy: str = ""  # what the user should do if `ok` is False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(arms: Sequence[ArmPlan], root: Path | str, machine: Machine) -> Iterator[Finding]:
    """Run all checks of the machine and of `arms`, and yield the result of each as soon as it is known.

    root: the runs folder
    """
    yield _software()
    yield from _hardware(machine)
    yield _writable(Path(root))
    if arms:
        yield _disk(Path(root), arms)
    checked: dict[tuple[str, str, str, int], bool] = {}
    for config in (arm.runs[0] for arm in arms):
        data = (config.data.dataset, config.data.variant, config.data.source, config.data.train_rows)
        if data not in checked:
            finding = _data(config, machine)
            checked[data] = finding.ok
            yield finding
        if checked[data]:
            yield _one_step(config, machine)
        else:
            remedy = f"first solve the problem with the dataset {config.data.dataset}"
            text = "no training step was tried, because the check of the dataset failed"
            yield Finding(config.id, False, text, remedy)


def existing_parent(path: Path) -> Path:
    """Return `path` if it exists, otherwise the nearest folder above it that exists."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    return path


def with_few_rows(config: RunConfig) -> RunConfig:
    """Return `config` limited to 200 training rows and 20 evaluation rows, for a short test run."""
    rows, eval_rows = config.data.train_rows or TRAIN_ROWS, config.data.eval_rows or EVAL_ROWS
    few = replace(config.data, train_rows=min(rows, TRAIN_ROWS), eval_rows=min(eval_rows, EVAL_ROWS))
    return replace(config, data=few)


def _software() -> Finding:
    from oelm.training.logs.manifest import versions

    found = versions()
    required = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    missing = [name for name in required if name not in found]
    if missing:
        text, remedy = f"not installed: {', '.join(missing)}", install_extra("study")
        return Finding("software", False, text, remedy)
    return Finding("software", True, ", ".join(f"{name} {version}" for name, version in found.items()))


def _hardware(machine: Machine) -> Iterator[Finding]:
    from oelm.training.logs.manifest import machine_facts
    from oelm.training.parallel.world import choose_device
    from oelm.training.precision import choose_precision

    facts = machine_facts()
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    yield Finding("machine", True, f"{facts['cores']} cores, {bytes_text(facts['memory_bytes'])}, {gpus}")
    code = "our own C++ code" if facts["compiled_attention"] else "torch (C++ code not compiled, or no AVX2)"
    yield Finding("attention", True, f"attention, GELU and cross-entropy of our GPT on a CPU: {code}")
    code = "our own C++ code" if facts["compiled_products"] else "torch"
    yield Finding("products", True, f"matrix products on a CPU: {code}")
    try:
        device = choose_device(machine.device)
        precision = choose_precision("auto", device)
        yield Finding("precision", True, f"{precision.dtype} on {device}: {precision.reason}")
    except (OelmError, RuntimeError) as error:
        yield Finding("precision", False, str(error), "choose an available device with --device")


def _writable(root: Path) -> Finding:
    parent = existing_parent(root)
    remedy = "choose a different runs folder with --runs"
    if not parent.is_dir():
        return Finding("runs folder", False, f"{parent} is not a folder", remedy)
    if not os.access(parent, os.W_OK | os.X_OK):
        return Finding("runs folder", False, f"no permission to write in {parent}", remedy)
    return Finding("runs folder", True, str(root.resolve()))


def _disk(root: Path, arms: Sequence[ArmPlan]) -> Finding:
    """Compare the free disk space with what the runs that have not finished will keep.

    While a run trains, it needs more than it keeps; this is added once, for the largest run. A tuning trial
    keeps neither checkpoints nor a model.
    """
    place = existing_parent(root)
    free = shutil.disk_usage(place).free
    runs = trials = needed = most = 0
    for arm in arms:
        plan = estimate(arm.runs[0], root)
        left = [config for config in arm.runs if state_of(run_path(root, config))[0] != "finished"]
        runs, trials = runs + len(left), trials + arm.total_trials
        needed += len(left) * (plan.kept_bytes or 0)
        most = max(most, (plan.disk_bytes or 0) - (plan.kept_bytes or 0))
    needed += most
    planned = f"{runs} runs and {trials} tuning trials" if trials else f"{runs} runs"
    text = f"{planned} need at most {bytes_text(needed)}; {bytes_text(free)} are free on {place}"
    if needed + _SPARE_BYTES > free:
        remedy = "free disk space, or choose a runs folder on another disk with --runs"
        return Finding("disk", False, text, remedy)
    return Finding("disk", True, text)


def _data(config: RunConfig, machine: Machine) -> Finding:
    """Check every row of every split of an experiment's dataset, so that an invalid label is found early."""
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
            corpus, batch_size=config.budget.batch_size, skip_bad_rows=machine.skip_bad_rows
        )
    except OelmError as error:
        return Finding(subject, False, error.problem, error.remedy or _DATA_REMEDY)
    if not report.ok:
        remedy = "correct these rows (--skip-bad-rows leaves bad rows out)"
        return Finding(subject, False, "; ".join(report.errors), remedy)
    rows = ", ".join(f"{split} {check.rows:,}" for split, check in report.splits.items())
    shared = report.duplicates.counts if report.duplicates else {}
    notes = [
        f"{count:,} rows of {first} are also in {second}"
        for (first, second), count in shared.items()
        if count
    ]
    return Finding(subject, True, f"{rows} rows from {report.origin}", notes=(*notes, *report.warnings))


def _one_step(config: RunConfig, machine: Machine) -> Finding:
    """Run one training step and one evaluation of an experiment on a few rows of its dataset."""
    from oelm.training.fit import fit

    short = replace(
        with_few_rows(config),
        budget=replace(config.budget, steps=1, epochs=0, eval_every=1, log_every=1, checkpoint_every=0),
        tune=replace(config.tune, trial=True),  # a tuning trial never reads the test split
    )
    with tempfile.TemporaryDirectory(prefix="oelm-doctor-") as place:
        folder = RunFolder(Path(place) / "run")
        try:
            outcome = fit(short, folder.path, machine)
        except OelmError as error:
            return Finding(config.id, False, error.problem, error.remedy or _OTHER_REMEDY)
        except Exception as error:
            return Finding(config.id, False, f"{type(error).__name__}: {error}", _OTHER_REMEDY)
        if outcome.state == "interrupted":  # Ctrl-C: the other experiments need not be tried either
            raise KeyboardInterrupt
        if outcome.state != "finished":
            remedy = _MEMORY_REMEDY if outcome.state == "oom" else _OTHER_REMEDY
            return Finding(config.id, False, f"{outcome.state}: {outcome.reason}", remedy)
        results, manifest = folder.results(), folder.manifest()
    assert results is not None
    assert results.validation is not None
    assert manifest is not None
    counts, tokenizer = results.parameters, manifest.tokenizer
    text = (
        f"one step and one evaluation: validation loss {results.validation.loss:.3f}, "
        f"{counts.trainable:,} of {counts.total:,} parameters train, "
        f"tokenizer {tokenizer.name} ({tokenizer.vocab_size:,} tokens)"
    )
    return Finding(config.id, True, text)
