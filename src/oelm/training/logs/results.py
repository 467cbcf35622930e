"""results.json, predictions.json and the closing timing_stats.json of a finished run."""

from __future__ import annotations

from typing import Any

from oelm.config.yaml import config_to_yaml
from oelm.errors import OelmError
from oelm.files.atomic import write_json, write_text
from oelm.runs.folder import RESULTS_FORMAT
from oelm.training.measure.flops import gemm_peak
from oelm.training.prepare import rows_per_step
from oelm.training.run import Run
from oelm.training.schedule import warmup_steps
from oelm.training.tasks.task import Evaluation


def write_results(run: Run, test: Evaluation | None) -> None:
    """The files other rooms read, then their checksums: where those are, the run is done."""
    _check_earlier_files(run)
    if test is not None and test.accuracy is not None:
        predictions = {"labels": list(test.labels), "predicted": list(test.predicted)}
        write_json(run.folder.predictions_file, predictions)
    run.timer.write(run.folder.timing_file, run.progress.step, _peak(run))
    write_json(run.folder.results_file, _results(run, test))
    run.folder.write_checksums()


def _check_earlier_files(run: Run) -> None:
    """The checksums must not vouch for a file that was damaged since this process wrote or read it."""
    if run.metrics is not None:
        run.metrics.check()
    with_damage = []
    try:
        same_config = run.folder.config() == run.config
    except OelmError:
        same_config = False
    if not same_config:
        write_text(run.folder.config_file, config_to_yaml(run.config))
        with_damage.append(run.folder.config_file.name)
    try:
        same_manifest = run.folder.manifest() == run.manifest
    except OelmError:
        same_manifest = False
    if not same_manifest:
        write_json(run.folder.manifest_file, run.manifest)
        with_damage.append(run.folder.manifest_file.name)
    for name in with_damage:
        run.journal.line(f"{name} was changed during the run by something else; it is written again")


def _results(run: Run, test: Evaluation | None) -> dict[str, Any]:
    """No times, no names of machines: the same bytes whether or not the run was interrupted."""
    c, p = run.config, run.progress
    return {
        "format": RESULTS_FORMAT,
        "id": c.id,
        "study": c.study,
        "scale": c.scale,
        "seed": c.seed,
        "task": c.task,
        "dataset": c.data.dataset,
        "arm": c.compare.arm or c.method.name,
        "method": c.method.name,
        "metric": run.prepared.task.metric,
        "test": test.figures() if test is not None else None,
        "validation": p.best,
        "parameters": run.parameters,
        "steps": p.step,
        "tokens_seen": p.tokens,
        "lr": c.optim.lr,
        "checkpoint_bytes": run.folder.latest.stat().st_size,
        "stopped_early": p.stopped_early,
        "fairness": _fairness(run),
    }


def _fairness(run: Run) -> dict[str, Any]:
    """What must be equal between arms that are compared."""
    c = run.config
    prints = run.prepared.data_facts["fingerprints"]
    return {
        "data": prints["train"],
        "tokenizer": run.prepared.tokenizer.hash,
        "eval_set": prints.get("test") or prints["validation"],
        "batch_rows": rows_per_step(c),
        "steps": run.total_steps,
        "schedule": f"{c.optim.schedule}, warm-up {warmup_steps(c.optim, run.total_steps)}",
    }


def _peak(run: Run) -> dict[str, Any]:
    """The share of what this machine's matrix products reach right now."""
    if not run.machine.gemm_peak:
        return {"gemm_peak_flops": None, "gemm_peak_share": None}
    peak = gemm_peak(run.world.device, run.precision.torch_dtype)
    reached = run.timer.stats(run.progress.step)["flops_per_second"]
    return {"gemm_peak_flops": peak, "gemm_peak_share": reached / peak if reached else None}
