"""A run while it lives: its parts, and how they are saved and put back.

`Progress` holds every number that the rest of the run depends on and that is no tensor; together with
weights, optimizer state and the random generators it is the whole of an exact resume.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oelm.config.hash import config_hash
from oelm.config.run_config import Machine, RunConfig
from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.files.checksums import find_damage, write_checksums
from oelm.methods.apply import Applied
from oelm.methods.audit import audit
from oelm.methods.saving.load import load_weights
from oelm.methods.saving.save import save
from oelm.runs.folder import RunFolder, State, Status
from oelm.training.checkpoint import save_checkpoint
from oelm.training.logs.journal import Journal
from oelm.training.logs.metrics import MetricsLog
from oelm.training.measure.flops import FlopModel, flop_model
from oelm.training.measure.timing import Timer
from oelm.training.optimizer import load_optimizer_state, optimizer_state
from oelm.training.parallel.world import World
from oelm.training.precision import Precision
from oelm.training.prepare import Prepared
from oelm.training.signals import StopRequest
from oelm.training.tasks.task import Batch, Evaluation, Objective

FORMAT = 1
_HEARTBEAT_SECONDS = 2.0


class Interrupted(Exception):
    """The run was asked to stop: checkpoint, then say "continue me"."""


class Diverged(Exception):
    """The loss is no number any more, or far above that of the untrained network."""


@dataclass
class Progress:
    """Where a run stands. Plain numbers only; saved with every checkpoint."""

    step: int = 0  # optimizer steps done
    tokens: int = 0
    split: int = (
        1  # micro-batches were halved this many times over (1, 2, 4, ...) after running out of memory
    )
    window_loss: float = 0.0  # summed over the steps since the last train row
    window_steps: int = 0
    first_loss: float | None = None
    running_loss: float = 0.0  # slow mean, for noticing divergence
    last_loss: float | None = None
    grad_norm: float | None = None  # of the last step
    validated: int = 0  # step of the last validation
    best: dict[str, Any] | None = None  # figures of the best validation, with its step
    worse: int = 0  # validations since the best one
    stopped_early: bool = False

    def best_evaluation(self) -> Evaluation | None:
        if self.best is None:
            return None
        return Evaluation(self.best["loss"], self.best["n"], self.best.get("accuracy"))


@dataclass
class Run:
    """The parts of one run on one process."""

    config: RunConfig
    machine: Machine
    folder: RunFolder
    world: World
    precision: Precision
    prepared: Prepared
    applied: Applied
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    journal: Journal
    timer: Timer
    stop: StopRequest
    total_steps: int
    status: Status
    progress: Progress = field(default_factory=Progress)
    manifest: dict[str, Any] = field(default_factory=dict)  # as in manifest.json
    metrics: MetricsLog | None = None  # the writing process' only
    updating: bool = False  # within the optimizer's update: the weights are of no whole step
    _saved: tuple[int, int] | None = None  # (step, validated) of the last checkpoint
    _schedule_changed: bool = False
    _audits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._qk_trained = self.applied.qk_trainable
        self.rewire()

    @property
    def model(self) -> nn.Module:
        return self.prepared.model

    def rewire(self) -> None:
        """After something froze or thawed: what is averaged between processes, and what a step costs."""
        objective = Objective(self.model, self.prepared.task)
        if self.config.compile:
            objective.compile()
        self.objective = self.world.wrap(objective)
        self.flops: FlopModel = flop_model(self.model)
        self.full_flops = self.flops.all_trained()
        self._qk_trained = max(self._qk_trained, self.applied.qk_trainable)

    def follow_schedule(self) -> None:
        """Freeze and thaw what the method says for the coming step."""
        if self.applied.step(self.progress.step, self.total_steps, self.optimizer):
            self._schedule_changed = True
            self.rewire()

    def tell_schedule(self) -> None:
        """After the step, so that a step begun twice tells once."""
        if self._schedule_changed:
            self.event(f"the method's schedule: {self.applied.trainable:,} parameters train now")
            self._schedule_changed = False

    def cost(self, batches: list[Batch]) -> tuple[float, float]:
        """FLOPs of a step as it is, and with nothing frozen."""
        shapes = [(b.rows, b.length, b.target_length) for b in batches]
        return (
            sum(self.flops.step(*shape).total for shape in shapes),
            sum(self.full_flops.step(*shape).total for shape in shapes),
        )

    @property
    def parameters(self) -> dict[str, int]:
        """Counts over the whole run: what trained at any time counts as trained."""
        trained = sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
        return {
            "total": self.applied.total,
            "trainable": trained,
            "frozen": self.applied.total - trained,
            "qk_total": self.applied.qk_total,
            "qk_trainable": self._qk_trained,
        }

    @property
    def micro_rows(self) -> int:
        return max(1, self.config.budget.batch_size // self.progress.split)

    @property
    def smaller_next_time(self) -> bool:
        """Whether a process of this run ran out of memory and asked for smaller micro-batches than these."""
        return self.world.size > 1 and self.folder.wanted_split() > self.progress.split

    def split_further(self, parts: int) -> None:
        """Cut every micro-batch into so many parts, and a step into as many more of them."""
        self.progress.split = parts
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.event(f"out of memory: micro-batches now have {self.micro_rows} rows, a step as many as before")

    # -- telling --------------------------------------------------------------------------------

    def row(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.row(self.progress.step, kind, **values)

    def event(self, text: str) -> None:
        """Something that belongs to the run itself, so it stands in the metrics as well as in the log."""
        self.row("event", text=text)
        self.journal.line(f"step {self.progress.step}: {text}")

    def pulse(self, *, force: bool = False, **changes: Any) -> None:
        """Write status.json, at most every few seconds unless forced."""
        p = self.progress
        if not self.world.main:
            return
        if not force and time.time() - self.status.heartbeat < _HEARTBEAT_SECONDS:
            return
        rate = self.timer.steps_per_second
        metric = self.prepared.task.metric
        self.status = self.folder.write_status(
            dataclasses.replace(
                self.status,
                step=p.step,
                total_steps=self.total_steps,
                loss=p.last_loss,
                metric={"name": metric, "value": p.best[metric]} if p.best else None,
                steps_per_second=rate,
                eta_seconds=(self.total_steps - p.step) / rate if rate else None,
                **changes,
            )
        )

    @property
    def stop_reason(self) -> str:
        """Why to stop now, if at all; a time limit shorter than one step must not stall a run for ever."""
        return self.stop.reason if self.stop.signalled or self.timer.steps_here else ""

    def check_stop(self) -> None:
        """Raise Interrupted when asked to stop; many processes agree on it after whole steps instead."""
        self.pulse()
        if self.world.size == 1 and self.stop_reason:
            raise Interrupted(self.stop_reason)

    def show_progress(self) -> None:
        self.journal.progress(self.progress.step, self.total_steps, self.pace())
        self.pulse()

    def pace(self) -> str:
        rate = self.timer.steps_per_second
        return f"{rate:.2f} steps/s" if rate else ""

    def audit(self, when: str) -> None:
        """Prove what is frozen; kept in freeze_audit.json, at the start and at the end."""
        report = audit(self.model, self.optimizer)
        self._audits[when] = report.to_dict()
        if self.world.main:
            write_json(self.folder.audit_file, self._audits)
        if not report.ok:
            raise OelmError(f"the audit at the {when} of the run failed: {report}")

    def close(self, state: State, reason: str) -> None:
        """The last word of this process; the status first, as the disk may be full."""
        self.pulse(force=True, state=state, reason=reason)
        if self.metrics is not None:
            try:
                self.metrics.close()
            except Exception as error:  # of a tracker's service: the run itself is complete without it
                self.journal.line(f"a tracker could not be closed: {type(error).__name__}: {error}")
            self.metrics = None
        self.journal.line(f"{state}{': ' + reason if reason else ''}")
        self.journal.close()

    # -- saving ---------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Whether latest.pt holds this very point of the run."""
        return self._saved == (self.progress.step, self.progress.validated)

    def save(self) -> None:
        """latest.pt: everything an exact resume needs."""
        rng = self.world.gather(random_state(self.world.device))
        moments = self.world.whole(optimizer_state(self.model, self.optimizer))
        with self.world.undivided(self.model):
            weights = self.model.state_dict() if self.world.main else {}
        p = self.progress
        if self.metrics is not None:
            metrics_bytes, metrics_sha256 = self.metrics.sync()
            state = {
                "format": FORMAT,
                "config_hash": config_hash(self.config),
                "progress": dataclasses.asdict(p),
                "metrics_bytes": metrics_bytes,
                "metrics_sha256": metrics_sha256,
                "data": self.prepared.identity,
                "model": weights,
                "optimizer": moments,
                "scaler": self.scaler.state_dict(),
                "rng": rng,
                "precision": self.precision.dtype,
            }
            save_checkpoint(state, self.folder.latest, self.folder.previous)
            self.timer.write(self.folder.timing_file, p.step)
        self._saved = (p.step, p.validated)

    def restore(self, state: dict[str, Any]) -> None:
        """Put everything back as `save` found it, except the metrics file."""
        if state.get("format") != FORMAT:
            raise OelmError(f"{self.folder.latest} has the format {state.get('format')}, not {FORMAT}")
        if state["config_hash"] != config_hash(self.config):
            raise OelmError(f"{self.folder.latest} belongs to another config than {self.folder.config_file}")
        self.progress = Progress(**state["progress"])
        with self.world.rewriting(self.model):
            if self.world.main:
                self.model.load_state_dict(state["model"])
        # As of the last whole step: what changes at the next one is told by that step, again.
        self.applied.step(max(0, self.progress.step - 1), self.total_steps)
        moments = self.world.own(state["optimizer"], dict(self.model.named_parameters()))
        load_optimizer_state(self.model, self.optimizer, moments)
        self.scaler.load_state_dict(state["scaler"])
        rng = state["rng"]
        if len(rng) == self.world.size:
            set_random_state(rng[self.world.rank], self.world.device)
        else:
            self.journal.line(
                f"the checkpoint was written by {len(rng)} processes, this run has {self.world.size}: "
                "dropout will differ from an uninterrupted run"
            )
        if state["precision"] != self.precision.dtype:
            self.journal.line(
                f"precision is now {self.precision.dtype}, was {state['precision']}: not an exact resume"
            )
        self._saved = (self.progress.step, self.progress.validated)
        self.rewire()

    def save_best(self) -> None:
        """best/: a folder that stands alone, swapped in as a whole."""
        with self.world.undivided(self.model):
            if self.world.main:
                self._write_best()

    def _write_best(self) -> None:
        fresh, old = (self.folder.path / name for name in (".best.new", ".best.old"))
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir()  # and not its parents: a run folder that was moved must not come back
            save(self.model, fresh)
            self.prepared.tokenizer.save(fresh)
            write_checksums(fresh)
            sync_tree(fresh)
        except BaseException:  # half a model must not go on filling a full disk
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.best.exists():
            self.folder.best.rename(old)
        fresh.rename(self.folder.best)
        shutil.rmtree(old, ignore_errors=True)

    def rebuild_best(self) -> None:
        """Write a best/ that was damaged again, which is possible where the weights are the best ones."""
        p = self.progress
        if p.best is None or p.best["step"] != p.step:
            return
        problem = best_problem(self.folder) if self.world.main else ""
        if problem:
            self.journal.line(f"{problem}; it is written again from the checkpoint")
        if self.world.sum([float(bool(problem))])[0]:  # every rank has to take part in the saving
            self.save_best()

    def load_best(self) -> None:
        """The weights of best/ into the network, on every process; an error when a checksum differs."""
        with self.world.rewriting(self.model):
            if self.world.main:
                load_weights(self.model, self.folder.best)


def best_problem(folder: RunFolder) -> str:
    """Why the best model cannot be used; "" when it is intact."""
    if not folder.best.is_dir():
        return f"{folder.best} is missing"
    damage = find_damage(folder.best)
    if damage is None and not any(folder.best.glob("*.safetensors")):
        damage = ["no weights"]  # of an earlier version, which wrote no checksums
    return f"{folder.best} is damaged ({'; '.join(damage)})" if damage else ""


def recover_best(folder: RunFolder) -> None:
    """A kill between the two renames of `save_best` left the old one under its other name."""
    old = folder.path / ".best.old"
    if old.exists() and not folder.best.exists():
        old.rename(folder.best)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder.path / ".best.new", ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Bring every file below to the disk, before a rename makes them the ones that count."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
