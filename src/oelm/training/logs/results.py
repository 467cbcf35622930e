"""Write the files of a finished run: results, test predictions or test losses, times and checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError
from oelm.files.atomic import write_text
from oelm.runs.schema import Fairness, Predictions, Results, Scores, TestLosses
from oelm.training.optimizer import warmup_steps
from oelm.training.state import Training
from oelm.training.tasks.task import Evaluation


def write_results(training: Training, test: Evaluation | None) -> None:
    """Write the results of a finished run; `test` is None for a tuning trial.

    checksums.json is written last, because it marks the run as complete.
    """
    folder, step = training.folder, training.progress.step
    _restore_changed_files(training)
    if test is not None and test.accuracy is not None:
        folder.write(Predictions(test.labels, test.predicted))
    elif test is not None:
        # Three decimals keep the file small, and are enough for the summed loss of hundreds of tokens.
        losses = tuple(round(loss, 3) for loss in test.part_losses)
        folder.write(TestLosses(test.part_tokens, losses))
    folder.write(training.recorder.timer.stats(step))
    folder.write(_results(training, test))
    folder.write_checksums()


def _restore_changed_files(training: Training) -> None:
    """Write config.yaml and manifest.json again if they changed during the run; also check metrics.jsonl.

    Otherwise checksums.json, which is written next, would have the hashes of the changed files.
    """
    folder, recorder = training.folder, training.recorder
    if recorder.metrics is not None:
        recorder.metrics.check()
    if not _still_equals(folder.config, training.config):
        write_text(folder.config_file, config_to_yaml(training.config))
        recorder.journal.line("config.yaml was changed by another program during the run; writing it again")
    if not _still_equals(folder.manifest, recorder.manifest):
        folder.write(recorder.manifest)
        recorder.journal.line("manifest.json was changed by another program during the run; writing it again")


def _still_equals(read: Callable[[], Any], expected: Any) -> bool:
    """Return whether `read()` returns `expected`; False if the file cannot be read."""
    try:
        return bool(read() == expected)
    except OelmError:
        return False


def _results(training: Training, test: Evaluation | None) -> Results:
    """Return the content of results.json.

    It has no times and no host names, so that a resumed run writes the same bytes as an uninterrupted run.
    """
    config, p = training.config, training.progress
    return Results.of(
        config,
        metric=training.prepared.task.metric,
        test=Scores(**test.metrics()) if test is not None else None,
        validation=Scores(**p.best) if p.best is not None else None,
        parameters=training.learner.parameter_counts(),
        steps=p.step,
        tokens_seen=p.tokens,
        checkpoint_bytes=training.folder.latest.stat().st_size,
        stopped_early=p.stopped_early,
        fairness=_fairness(training),
    )


def _fairness(training: Training) -> Fairness:
    """Return the properties that must be equal in two runs for a fair comparison of their methods."""
    config = training.config
    fingerprints = training.prepared.data_facts.fingerprints
    return Fairness(
        data=fingerprints["train"],
        tokenizer=training.prepared.tokenizer.hash,
        eval_set=fingerprints.get("test") or fingerprints["validation"],
        batch_rows=config.budget.rows_per_step,
        steps=training.total_steps,
        schedule=f"{config.optim.schedule}, warm-up {warmup_steps(config.optim, training.total_steps)}",
    )
