"""Save the state of a run as a checkpoint, check whether the checkpoint is usable, and resume from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from oelm.config.hash import config_hash
from oelm.errors import OelmError
from oelm.training.checkpoints.best import best_problem, best_step_problem
from oelm.training.checkpoints.file import NewestCheckpoint, load_newest, save_checkpoint
from oelm.training.determinism import RandomState, random_state, set_random_state
from oelm.training.logs.metrics import metrics_problem
from oelm.training.optimizer import OptimizerState, load_optimizer_state, optimizer_state
from oelm.training.prepare import Prepared
from oelm.training.state import Training, TrainingJob, TrainingProgress


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint."""

    config_hash: str
    progress: dict[str, Any]  # the fields of `TrainingProgress`
    metrics_bytes: int  # length of metrics.jsonl when the checkpoint was written
    metrics_sha256: str  # hash of the first `metrics_bytes` bytes of metrics.jsonl
    data: dict[str, Any]  # hashes of the data and the tokenizer
    model: dict[str, Any]
    optimizer: OptimizerState
    scaler: dict[str, Any]
    rng: list[RandomState]  # state of the random generators, one per rank
    precision: str

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Snapshot:
        try:
            return cls(**state)
        except TypeError:
            raise OelmError(
                "the run cannot be resumed, because its checkpoint was written by a different version of "
                "oelm: use that version, or start over in another folder"
            ) from None


def save_training(training: Training) -> None:
    """Write the state of the run to the checkpoint latest.pt. Every rank must call this."""
    learner, world, p = training.learner, training.world, training.progress
    rng = world.gather(random_state(world.device))
    moments = world.gather_full_state(optimizer_state(learner.model, learner.optimizer))
    with world.full_params_on_rank0(learner.model):
        weights = learner.model.state_dict() if world.is_main else {}
    if training.recorder.metrics is not None:
        metrics_bytes, metrics_sha256 = training.recorder.metrics.sync()
        snapshot = Snapshot(
            config_hash=config_hash(training.config),
            progress=dataclasses.asdict(p),
            metrics_bytes=metrics_bytes,
            metrics_sha256=metrics_sha256,
            data=training.prepared.identity,
            model=weights,
            optimizer=moments,
            scaler=learner.scaler.state_dict(),
            rng=rng,
            precision=learner.precision.dtype,
        )
        save_checkpoint(vars(snapshot), training.folder.latest, training.folder.previous)
        training.folder.write(training.recorder.timer.stats(p.step))
    training.saved_at = (p.step, p.validated)


def find_checkpoint(job: TrainingJob) -> NewestCheckpoint:
    """Return the newest checkpoint from which the run can continue exactly."""
    return load_newest(job.folder.latest, job.folder.previous, lambda state: _problem(state, job))


def _problem(state: dict[str, Any], job: TrainingJob) -> str:
    """Return why the run cannot continue exactly from this undamaged checkpoint; "" if it can."""
    snapshot = Snapshot.from_dict(state)
    # Raise at once instead of trying previous.pt, which has the same config as latest.pt.
    if snapshot.config_hash != config_hash(job.config):
        raise OelmError(
            f"the checkpoint {job.folder.latest} was written with a different config than "
            f"{job.folder.config_file}: restore the config, or start over in another folder"
        )
    if problem := metrics_problem(job.folder.metrics_file, snapshot.metrics_bytes, snapshot.metrics_sha256):
        return problem
    best = snapshot.progress["best"]
    if best is not None and best["step"] != snapshot.progress["step"]:
        # The weights of this checkpoint are not the best ones, so `repair_best()` cannot write best/ again.
        return best_problem(job.folder) or best_step_problem(job.folder, best, snapshot.progress["step"])
    return ""


def check_same_data(snapshot: Snapshot, prepared: Prepared) -> None:
    """Raise OelmError if the data or the tokenizer has changed since the checkpoint was written."""
    before, now = snapshot.data, prepared.identity
    for split, fingerprint in before["fingerprints"].items():
        if now["fingerprints"].get(split) != fingerprint:
            raise OelmError(
                f"the {split} data of this run ({prepared.data_facts.origin}) has changed since the run "
                "began: restore the data, or start over in another folder"
            )
    if before["tokenizer"] != now["tokenizer"]:
        raise OelmError(
            f"the tokenizer of this run ({prepared.tokenizer.name}) has changed since the run began: restore "
            "the tokenizer, or start over in another folder"
        )


def restore_training(training: Training, snapshot: Snapshot) -> None:
    """Restore the state that `save_training()` saved.

    metrics.jsonl is not restored here: `MetricsLog` cuts it back to the step of the checkpoint.
    """
    learner, world, journal = training.learner, training.world, training.recorder.journal
    training.progress = p = TrainingProgress(**snapshot.progress)
    with world.write_params_on_rank0(learner.model):
        if world.is_main:
            learner.model.load_state_dict(snapshot.model)
    # Freeze as in the last completed step; the training loop calls `follow_schedule()` for the next one.
    learner.applied.step(max(0, p.step - 1), training.total_steps, rewraps=True)
    moments = world.shard_state(snapshot.optimizer, dict(learner.model.named_parameters()))
    load_optimizer_state(learner.model, learner.optimizer, moments)
    learner.scaler.load_state_dict(snapshot.scaler)
    if len(snapshot.rng) == world.size:
        set_random_state(snapshot.rng[world.rank], world.device)
    else:
        journal.line(
            f"the checkpoint was written by {len(snapshot.rng)} processes, but this run has {world.size}: "
            "dropout will differ from an uninterrupted run"
        )
    if snapshot.precision != learner.precision.dtype:
        journal.line(
            f"the precision was {snapshot.precision} and is now {learner.precision.dtype}: the result will "
            "differ from that of an uninterrupted run"
        )
    training.saved_at = (p.step, p.validated)
    learner.rebuild()
