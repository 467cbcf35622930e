"""Everything before the first step: machine, data, network, method, optimizer, and an earlier checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from typing import Any

import torch

from oelm.atomic import write_json
from oelm.data.encoding import Progress as EncodingProgress
from oelm.errors import OelmError, UsageError
from oelm.methods.apply import apply
from oelm.training.checkpoint import load_newest, remove_strays
from oelm.training.config import Config, Machine
from oelm.training.distributed import World
from oelm.training.folder import RunFolder, State, Status, config_hash
from oelm.training.journal import Journal
from oelm.training.manifest import base_manifest
from oelm.training.memory import DiskPlan, disk_plan, require_disk
from oelm.training.metrics import MetricsLog
from oelm.training.optimizer import build_optimizer
from oelm.training.precision import choose_precision
from oelm.training.prepare import Prepared, prepare
from oelm.training.run import Interrupted, Run, recover_best
from oelm.training.schedule import warmup_steps
from oelm.training.signals import StopRequest
from oelm.training.timing import Timer
from oelm.training.trackers import open_trackers


def set_up(config: Config, machine: Machine, folder: RunFolder, world: World, stop: StopRequest) -> Run:
    """A run ready for its next step, which is the first one or the one after its checkpoint."""
    if machine.shard and config.compile:
        raise UsageError("a network that is divided between processes cannot be compiled: compile=false")
    if machine.threads < 0:
        raise UsageError(f"threads must be 0 (torch's own choice) or more, not {machine.threads}")
    if machine.threads:
        torch.set_num_threads(machine.threads)
    status = _begin(folder, world)
    journal = Journal(
        folder.log_file if world.main else None, title=config.id, show=None if world.main else False
    )
    for line in _opening(config, world, status):
        journal.line(line)
    precision = choose_precision(config.precision, world.device)
    journal.line(f"precision: {precision.dtype} ({precision.reason})")
    prepared = _prepare(config, machine, folder, world, stop, status, journal)

    applied = apply(prepared.model.train(), config.method, seed=config.seed)
    world.place(prepared.model)
    optimizer = build_optimizer(prepared.model, config.optim)
    plan = disk_plan(prepared.model, optimizer)
    journal.line(str(applied))
    journal.line(str(plan))
    state, words = load_newest(folder.latest, folder.previous)
    for word in words:
        journal.line(word)
    if world.main:
        require_disk(plan, folder)
        _write_manifest(config, folder, prepared, precision.to_dict(), plan, resuming=state is not None)
    run = Run(
        config=config,
        machine=machine,
        folder=folder,
        world=world,
        precision=precision,
        prepared=prepared,
        applied=applied,
        optimizer=optimizer,
        scaler=precision.scaler(),
        journal=journal,
        timer=Timer(folder.path / "step_times.bin", world.device, folder.timing() if state else None),
        stop=stop,
        total_steps=total_steps(config, prepared),
        status=status,
    )
    warm = warmup_steps(config.optim, run.total_steps)
    if warm > run.total_steps:
        journal.line(
            f"the warm-up takes {warm} steps, the run only {run.total_steps}: its rate never rises above "
            f"{run.total_steps / warm:.0%} of optim.lr"
        )
    torch.manual_seed(config.seed + world.rank)  # dropout; each process its own
    run.audit("start")
    _resume(run, state)
    if words:  # or the next checkpoint would keep the damaged one as the one before
        world.barrier()
        if world.main:
            folder.previous.replace(folder.latest)
    return run


def total_steps(config: Config, prepared: Prepared) -> int:
    """Steps, or the steps of the epochs; the lesser when both are given."""
    by_epochs = config.budget.epochs * prepared.task.steps_per_epoch
    return min(filter(None, (config.budget.steps, by_epochs)))


def record_failure(
    folder: RunFolder, world: World, run: Run | None, state: State, reason: str, trace: str = ""
) -> None:
    """Leave the reason where people look, also when the run never came to life or the disk is full."""
    if not world.main:
        return
    with contextlib.suppress(OSError):
        if run is not None:
            run.close(state, reason)
        else:
            status = folder.status() or Status()
            folder.write_status(dataclasses.replace(status, state=state, reason=reason))
    with contextlib.suppress(OSError):
        journal = Journal(folder.log_file, show=False)
        journal.line(trace or reason)
        journal.close()


def _begin(folder: RunFolder, world: World) -> Status:
    before = folder.status()
    status = Status(
        started=time.time(),
        pid=os.getpid(),
        host=socket.gethostname(),
        attempt=before.attempt + 1 if before else 1,
        resumes=before.resumes if before else 0,
        step=before.step if before else 0,
        total_steps=before.total_steps if before else 0,
    )
    if world.main:
        remove_strays(folder.path)
        recover_best(folder)
        status = folder.write_status(status)
    world.barrier()
    return status


def _opening(config: Config, world: World, status: Status) -> list[str]:
    threads = torch.get_num_threads()
    return [
        f"{config.study} {config.id}, scale {config.scale}, seed {config.seed}, method {config.method.name}",
        f"attempt {status.attempt} on {status.host}: {world.device}, {threads} threads, {world}",
    ]


def _prepare(
    config: Config,
    machine: Machine,
    folder: RunFolder,
    world: World,
    stop: StopRequest,
    status: Status,
    journal: Journal,
) -> Prepared:
    """The first process encodes, the others then find it done."""

    def tick(progress: EncodingProgress) -> None:
        nonlocal status
        if stop.reason and world.size == 1:
            raise Interrupted(stop.reason)
        if world.main and time.time() - status.heartbeat > 10:
            status = folder.write_status(status)
            journal.line(
                f"encoding {progress.split}: {progress.rows:,} rows, {progress.tokens:,} tokens, "
                f"{progress.megabytes_per_second:.1f} MB/s"
            )

    if not world.main:
        world.barrier()
    prepared = prepare(config, machine, tick)
    if world.main:
        world.barrier()
    facts = prepared.data_facts
    rows = ", ".join(f"{split} {count:,}" for split, count in facts["rows"].items())
    journal.line(f"data: {facts['origin']}; rows: {rows}; tokenizer {prepared.tokenizer.name}")
    for note in facts["notes"]:
        journal.line(f"data: {note}")
    return prepared


def _write_manifest(
    config: Config,
    folder: RunFolder,
    prepared: Prepared,
    precision: dict[str, str],
    plan: DiskPlan,
    *,
    resuming: bool,
) -> None:
    """Once, when a run begins; a resume only checks that it goes on with the same data."""
    held = folder.manifest()
    if resuming and held is not None:
        _must_be_same(held, prepared)
        return
    manifest = base_manifest(config_hash(config))
    manifest |= {
        "precision": precision,
        "data": prepared.data_facts,
        "tokenizer": prepared.tokenizer_facts,
        "disk_bytes_planned": plan.total,
    }
    write_json(folder.manifest_file, manifest)


def _must_be_same(held: dict[str, Any], prepared: Prepared) -> None:
    for split, was in held.get("data", {}).get("fingerprints", {}).items():
        if prepared.data_facts["fingerprints"].get(split) != was:
            raise OelmError(
                f"the {split} data is not what this run began with ({held['data']['origin']}): "
                "put it back, or start over in another folder"
            )
    if held.get("tokenizer", {}).get("hash") != prepared.tokenizer.hash:
        raise OelmError("the tokenizer is not the one this run began with: put it back, or start over")


def _resume(run: Run, state: dict[str, Any] | None) -> None:
    if state is not None:
        run.restore(state)
        run.status = dataclasses.replace(run.status, resumes=run.status.resumes + 1)
        run.journal.line(f"going on after step {run.progress.step} of {run.total_steps}")
    if run.world.main:
        offset = state["metrics_bytes"] if state is not None else 0
        trackers = open_trackers(run.machine.trackers, run.config, run.folder.path, run.progress.step)
        run.metrics = MetricsLog(run.folder.metrics_file, offset=offset, trackers=trackers)
        if run.metrics.missing:
            run.journal.line(
                f"{run.folder.metrics_file} lacks {run.metrics.missing} bytes that the checkpoint counts on: "
                "rows were lost by something other than this program"
            )
    if run.smaller_next_time:
        run.split_further(run.folder.wanted_split())
    run.pulse(force=True)
