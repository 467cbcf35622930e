"""Everything before the first step: machine, data, network, method, optimizer, and an earlier checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from oelm.config.hash import config_hash
from oelm.config.run_config import Machine, RunConfig
from oelm.data.tokenize.encoding import EncodingProgress
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import remove_leftovers, write_json
from oelm.methods.apply import apply
from oelm.runs.folder import RunFolder, State, Status
from oelm.training.checkpoint import load_newest
from oelm.training.logs.journal import Journal
from oelm.training.logs.manifest import base_manifest
from oelm.training.logs.metrics import MetricsLog, metrics_problem
from oelm.training.logs.trackers import open_trackers
from oelm.training.measure.memory import disk_plan, require_disk
from oelm.training.measure.timing import Timer
from oelm.training.optimizer import build_optimizer
from oelm.training.parallel.world import World
from oelm.training.precision import choose_precision
from oelm.training.prepare import Prepared, prepare
from oelm.training.run import Interrupted, Run, best_problem, recover_best
from oelm.training.schedule import warmup_steps
from oelm.training.signals import StopRequest


def set_up(config: RunConfig, machine: Machine, folder: RunFolder, world: World, stop: StopRequest) -> Run:
    """A run ready for its next step, which is the first one or the one after its checkpoint."""
    if machine.shard and config.compile:
        raise UsageError("a network that is divided between processes cannot be compiled: compile=false")
    if machine.threads < 0:
        raise UsageError(f"threads must be 0 (torch's own choice) or more, not {machine.threads}")
    if machine.threads:
        torch.set_num_threads(machine.threads)
    journal = Journal(
        folder.log_file if world.main else None, title=config.id, show=None if world.main else False
    )
    status = _begin(folder, world, journal)
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
    state, problems = load_newest(
        folder.latest, folder.previous, lambda state: _checkpoint_problem(state, config, folder)
    )
    for problem in problems:
        journal.line(f"{problem}; going back to the checkpoint before it")
    if state is not None:
        held = _intact(folder.manifest, journal)
        _check_same_data(state.get("data") or _identity_in(held), prepared)
    else:
        held = None
    if held is not None and _identity_in(held) == prepared.identity:
        manifest = held
    else:
        manifest = base_manifest(config_hash(config), machine.command) | {
            "precision": precision.to_dict(),
            "data": prepared.data_facts,
            "tokenizer": prepared.tokenizer_facts,
            "disk_bytes_planned": plan.total,
        }
    if world.main:
        require_disk(plan, folder)
        if manifest is not held:
            write_json(folder.manifest_file, manifest)
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
        timer=Timer(
            folder.path / "step_times.bin", world.device, _intact(folder.timing, journal) if state else None
        ),
        stop=stop,
        total_steps=total_steps(config, prepared),
        status=status,
        manifest=manifest,
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
    if problems:  # do not rotate the unusable file into previous.pt
        world.barrier()
        if world.main:
            folder.previous.replace(folder.latest)
    run.rebuild_best()
    return run


def total_steps(config: RunConfig, prepared: Prepared) -> int:
    """Steps, or the steps of the epochs; the lesser when both are given."""
    by_epochs = config.budget.epochs * prepared.task.steps_per_epoch
    return min(filter(None, (config.budget.steps, by_epochs)))


def record_failure(
    folder: RunFolder, world: World, run: Run | None, state: State, reason: str, trace: str = ""
) -> None:
    """Leave the reason where people look, also when the run never came to life or the disk is full."""
    if not world.main:
        return
    try:
        if run is not None:
            run.close(state, reason)
        else:
            folder.write_status(dataclasses.replace(_last_status(folder), state=state, reason=reason))
    except OSError as error:
        print(f"oelm: {state}: {reason} (status.json cannot be written: {error})", file=sys.stderr)
    journal = Journal(folder.log_file, show=False)
    journal.line(trace or reason)
    journal.close()


def _last_status(folder: RunFolder) -> Status:
    with contextlib.suppress(OelmError, OSError):
        return folder.status() or Status()
    return Status()


def _begin(folder: RunFolder, world: World, journal: Journal) -> Status:
    before: Status | None = None
    try:
        before = folder.status()
    except OelmError as error:
        journal.line(f"{error}; it is written anew")
    if before is not None and before.state == "finished":
        journal.line(
            f"this run had finished, but {'; '.join(folder.integrity().damaged)}; completing it again"
        )
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
        remove_leftovers(folder.path)
        recover_best(folder)
        status = folder.write_status(status)
    world.barrier()
    return status


def _opening(config: RunConfig, world: World, status: Status) -> list[str]:
    threads = torch.get_num_threads()
    return [
        f"{config.study} {config.id}, scale {config.scale}, seed {config.seed}, method {config.method.name}",
        f"attempt {status.attempt} on {status.host}: {world.device}, {threads} threads, {world}",
    ]


def _prepare(
    config: RunConfig,
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


def _intact(read: Callable[[], dict[str, Any] | None], journal: Journal) -> dict[str, Any] | None:
    """What `read` returns; None, and a line in the log, for a damaged file that this run can write anew."""
    try:
        return read()
    except OelmError as error:
        journal.line(f"{error}; it is written anew")
        return None


def _checkpoint_problem(state: dict[str, Any], config: RunConfig, folder: RunFolder) -> str:
    """Why the run cannot go on exactly from this intact checkpoint; "" when it can."""
    if state.get("config_hash") != config_hash(config):
        return ""  # `Run.restore` refuses it, and the checkpoint before it is no remedy
    if "metrics_sha256" in state:  # an earlier version did not write it
        problem = metrics_problem(folder.metrics_file, state["metrics_bytes"], state["metrics_sha256"])
        if problem:
            return problem
    progress = state["progress"]
    if progress["best"] is not None and progress["best"]["step"] != progress["step"]:
        return best_problem(folder)  # with the weights of that very step it could be written again
    return ""


def _identity_in(manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """Hashes of the data and the tokenizer in a manifest.json; None when it does not hold them."""
    try:
        return {
            "fingerprints": dict(manifest["data"]["fingerprints"]),  # type: ignore[index]
            "tokenizer": manifest["tokenizer"]["hash"],  # type: ignore[index]
        }
    except (TypeError, KeyError, ValueError):
        return None


def _check_same_data(held: dict[str, Any] | None, prepared: Prepared) -> None:
    """Refuse to go on with other data than the run began with."""
    if held is None:
        return
    now = prepared.identity
    for split, was in held["fingerprints"].items():
        if now["fingerprints"].get(split) != was:
            raise OelmError(
                f"the {split} data is not what this run began with ({prepared.data_facts['origin']}): "
                "put it back, or start over in another folder"
            )
    if held["tokenizer"] != now["tokenizer"]:
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
    if run.smaller_next_time:
        run.split_further(run.folder.wanted_split())
    run.pulse(force=True)
