"""Set up a run before training: data, model, method, optimizer, and the checkpoint to resume from."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from oelm.config.hash import config_hash
from oelm.config.run_config import Machine, RunConfig
from oelm.cores import keep_freed_memory
from oelm.data.tokenize.encoding import EncodingProgress
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import remove_leftovers
from oelm.runs.schema import PrecisionFacts, Status, TimingStats
from oelm.training.checkpoints.best import recover_best, repair_best
from oelm.training.checkpoints.resume import Snapshot, check_same_data, find_checkpoint, restore_training
from oelm.training.learner import Learner
from oelm.training.logs.journal import Journal
from oelm.training.logs.manifest import base_manifest
from oelm.training.logs.metrics import MetricsLog
from oelm.training.logs.recorder import Recorder
from oelm.training.logs.trackers import open_trackers
from oelm.training.loop import audit_freezing
from oelm.training.measure.disk import disk_plan, require_disk
from oelm.training.optimizer import warmup_steps
from oelm.training.out_of_memory import restart_with_smaller_batches, split_micro_batches
from oelm.training.precision import choose_precision
from oelm.training.prepare import Prepared, prepare
from oelm.training.state import Interrupted, Training, TrainingJob


def set_up(job: TrainingJob) -> Training:
    """Return the state of a run that is ready to train: from step 0, or from its newest checkpoint."""
    config, folder, world = job.config, job.folder, job.world
    _check_machine(job.machine, config)
    if job.machine.threads:
        torch.set_num_threads(job.machine.threads)
    recorder = _open_recorder(job)
    precision = choose_precision(config.precision, world.device)
    recorder.journal.line(f"precision: {precision.dtype} ({precision.reason})")
    prepared = _prepare_on_rank0_first(job, recorder)
    keep_freed_memory()  # only from here on, so that the memory of the preparation is returned

    training = Training(job, prepared, Learner(config, prepared, world, precision), recorder)
    checkpoint = find_checkpoint(job)
    for problem in checkpoint.rejected:
        recorder.journal.line(f"{problem}; resuming from the checkpoint before it")
    snapshot = Snapshot.from_dict(checkpoint.state) if checkpoint.state is not None else None
    if snapshot is not None:
        check_same_data(snapshot, prepared)
    _write_manifest(training, resumed=snapshot is not None)
    _warn_if_warmup_is_too_long(training)

    torch.manual_seed(config.seed + world.rank)  # every rank needs different random numbers for dropout
    audit_freezing(training, "start")
    _resume_or_start(training, snapshot)
    # Replace an unusable latest.pt by previous.pt. Otherwise the next save would rename the unusable file to
    # previous.pt and so overwrite the good checkpoint.
    if checkpoint.rejected:
        world.barrier()
        if world.is_main:
            folder.previous.replace(folder.latest)
    repair_best(training)
    return training


def _check_machine(machine: Machine, config: RunConfig) -> None:
    if machine.shard and config.compile:
        raise UsageError("--shard does not work with compile=true: set compile=false, or leave out --shard")
    if machine.threads < 0:
        raise UsageError(f"threads must be 0 (torch's default) or more, not {machine.threads}")


def _open_recorder(job: TrainingJob) -> Recorder:
    """Return the recorder of the run, after opening training.log and writing the first status.json."""
    config, folder, world = job.config, job.folder, job.world
    recorder = Recorder(folder, world, title=config.id, echo=job.machine.echo)
    journal = recorder.journal
    before: Status = _read_or_none(folder.status, journal) or Status(attempt=0)
    if before.state == "finished":
        damage = "; ".join(folder.damage().values())
        journal.line(f"this run had finished, but files are damaged ({damage}); completing the run again")
    recorder.status = Status(
        started=time.time(),
        pid=os.getpid(),
        host=socket.gethostname(),
        attempt=before.attempt + 1,
        resumes=before.resumes,
        step=before.step,
        total_steps=before.total_steps,
    )
    if world.is_main:
        remove_leftovers(folder.path)
        recover_best(folder)
    recorder.write_status()
    world.barrier()
    journal.line(
        f"{config.study} {config.id}, scale {config.scale}, seed {config.seed}, method {config.method.name}"
    )
    journal.line(
        f"attempt {recorder.status.attempt} on {recorder.status.host}: {world.device}, "
        f"{torch.get_num_threads()} threads, {world}"
    )
    return recorder


def _prepare_on_rank0_first(job: TrainingJob, recorder: Recorder) -> Prepared:
    """Return the prepared run. Rank 0 tokenizes the data first; the other ranks then read it from the cache.

    If rank 0 is asked to stop while it tokenizes, all ranks raise Interrupted.
    """
    world, journal = job.world, recorder.journal

    def report(progress: EncodingProgress) -> None:
        if job.stop.reason and world.is_main:
            raise Interrupted(job.stop.reason)
        if world.is_main and time.time() - recorder.status.heartbeat > 10:
            share = f"{progress.rows:,} rows" if progress.share is None else f"{100 * progress.share:.0f} %"
            recorder.write_status(preparing=f"{progress.split} {share}")
            journal.line(
                f"encoding {progress.split}: {progress.rows:,} rows, {progress.tokens:,} tokens, "
                f"{progress.megabytes_per_second:.1f} MB/s"
            )

    prepared, stopped = None, ""
    if world.is_main:
        try:
            prepared = prepare(job.config, job.machine, report)
        except Interrupted as error:
            stopped = str(error)
    if world.any(bool(stopped)):
        raise Interrupted(stopped or "a signal to another process")
    prepared = prepared or prepare(job.config, job.machine, report)
    if recorder.status.preparing:
        recorder.write_status(preparing="")
    facts = prepared.data_facts
    rows = ", ".join(f"{split} {count:,}" for split, count in facts.rows.items())
    journal.line(f"data: {facts.origin}; rows: {rows}; tokenizer {prepared.tokenizer.name}")
    for note in facts.notes:
        journal.line(f"data: {note}")
    return prepared


def _write_manifest(training: Training, *, resumed: bool) -> None:
    """Check the free disk space and write manifest.json.

    A resumed run keeps the manifest.json that it has, unless the file is damaged or names other data.
    """
    folder, prepared, recorder = training.folder, training.prepared, training.recorder
    plan = disk_plan(training.learner.model, training.learner.optimizer)
    recorder.journal.line(str(training.learner.applied))
    recorder.journal.line(str(plan))
    precision = training.learner.precision
    held = _read_or_none(folder.manifest, recorder.journal) if resumed else None
    if held is not None and held.data_identity == prepared.identity:
        recorder.manifest = held
        before = held.precision.dtype  # "" in a manifest of an old version
        if before and not before.endswith(precision.dtype):  # the rest of the run is in another format
            both = PrecisionFacts(f"{before} then {precision.dtype}", precision.reason)
            recorder.manifest = dataclasses.replace(held, precision=both)
    else:
        recorder.manifest = dataclasses.replace(
            base_manifest(config_hash(training.config), training.job.machine.command),
            precision=PrecisionFacts(precision.dtype, precision.reason),
            data=prepared.data_facts,
            tokenizer=prepared.tokenizer_facts,
            disk_bytes_planned=plan.total,
        )
    if training.world.is_main:
        require_disk(plan, folder)
        if recorder.manifest is not held:
            folder.write(recorder.manifest)


def _warn_if_warmup_is_too_long(training: Training) -> None:
    total = training.total_steps
    warm = warmup_steps(training.config.optim, total)
    if warm > total:
        training.recorder.journal.line(
            f"warning: the warm-up takes {warm} steps, but the run has only {total}, so the learning rate "
            f"never rises above {100 * total / warm:.0f} % of optim.lr"
        )


def _resume_or_start(training: Training, snapshot: Snapshot | None) -> None:
    recorder, folder = training.recorder, training.folder
    timing = _read_or_none(folder.timing, recorder.journal) if snapshot is not None else None
    recorder.timer.start(timing or TimingStats())
    if snapshot is not None:
        restore_training(training, snapshot)
        recorder.status = dataclasses.replace(recorder.status, resumes=recorder.status.resumes + 1)
        recorder.journal.line(f"resuming after step {training.progress.step} of {training.total_steps}")
    if training.world.is_main:
        offset = snapshot.metrics_bytes if snapshot is not None else 0
        trackers = open_trackers(
            training.job.machine.trackers, training.config, folder.path, training.progress.step
        )
        recorder.metrics = MetricsLog(folder.metrics_file, offset=offset, trackers=trackers)
    parts = folder.wanted_split() if restart_with_smaller_batches(training) else 0
    training.world.barrier()  # all ranks must have read split.json before one of them may write it again
    if parts:
        split_micro_batches(training, parts)
    training.report_status(force=True)


def _read_or_none(read: Callable[[], Any], journal: Journal) -> Any:
    """Return `read()`; if the file is damaged, log this and return None, and the run writes a new file."""
    try:
        return read()
    except OelmError as error:
        journal.line(f"{error}; writing it again")
        return None
