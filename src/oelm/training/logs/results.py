"""Write the files of a finished run: results.json, predictions.json, timing_stats.json, checksums.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError
from oelm.files.atomic import write_json, write_text
from oelm.runs.folder import RESULTS_FORMAT
from oelm.training.optimizer import warmup_steps
from oelm.training.prepare import rows_per_step
from oelm.training.state import Training
from oelm.training.tasks.task import Evaluation


def write_results(training: Training, test: Evaluation | None) -> None:
    """Write the results, and last the checksums, which mark the run as complete."""
    folder, step = training.folder, training.progress.step
    _restore_changed_files(training)
    if test is not None and test.accuracy is not None:
        predictions = {"labels": list(test.labels), "predicted": list(test.predicted)}
        write_json(folder.predictions_file, predictions)
    training.recorder.timer.write(folder.timing_file, step)
    write_json(folder.results_file, _results(training, test))
    folder.write_checksums()


def _restore_changed_files(training: Training) -> None:
    """Check the files written earlier, because the checksums must not cover files damaged since then."""
    folder, recorder = training.folder, training.recorder
    if recorder.metrics is not None:
        recorder.metrics.check()
    if not _holds(folder.config, training.config):
        write_text(folder.config_file, config_to_yaml(training.config))
        recorder.journal.line("config.yaml was changed by another program during the run; writing it again")
    if not _holds(folder.manifest, recorder.manifest):
        write_json(folder.manifest_file, recorder.manifest)
        recorder.journal.line("manifest.json was changed by another program during the run; writing it again")


def _holds(read: Callable[[], Any], expected: Any) -> bool:
    try:
        return bool(read() == expected)
    except OelmError:
        return False


def _results(training: Training, test: Evaluation | None) -> dict[str, Any]:
    """Return results.json; without times and host names, so that it is bit-identical after a resume."""
    config, p = training.config, training.progress
    return {
        "format": RESULTS_FORMAT,
        "id": config.id,
        "study": config.study,
        "scale": config.scale,
        "seed": config.seed,
        "task": config.task,
        "dataset": config.data.dataset,
        "arm": config.compare.arm or config.method.name,
        "method": config.method.name,
        "metric": training.prepared.task.metric,
        "test": test.metrics() if test is not None else None,
        "validation": p.best,
        "parameters": training.learner.parameter_counts(),
        "steps": p.step,
        "tokens_seen": p.tokens,
        "lr": config.optim.lr,
        "checkpoint_bytes": training.folder.latest.stat().st_size,
        "stopped_early": p.stopped_early,
        "fairness": _fairness(training),
    }


def _fairness(training: Training) -> dict[str, Any]:
    """Return the facts that must be equal between arms that are compared."""
    config = training.config
    fingerprints = training.prepared.data_facts["fingerprints"]
    return {
        "data": fingerprints["train"],
        "tokenizer": training.prepared.tokenizer.hash,
        "eval_set": fingerprints.get("test") or fingerprints["validation"],
        "batch_rows": rows_per_step(config),
        "steps": training.total_steps,
        "schedule": f"{config.optim.schedule}, warm-up {warmup_steps(config.optim, training.total_steps)}",
    }
