"""`Training`: the complete state of one run on one process, in five parts.

`TrainingProgress` contains every counter and loss that later training steps depend on. To resume exactly, a
run needs only these values, the weights, the optimizer state and the state of the random generators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oelm.config.run_config import Machine, RunConfig
from oelm.runs.folder import RunFolder
from oelm.runs.schema import BestMetric
from oelm.training.learner import Learner
from oelm.training.logs.recorder import Recorder
from oelm.training.parallel.world import World
from oelm.training.prepare import Prepared
from oelm.training.signals import StopRequest
from oelm.training.tasks.task import Evaluation


class Interrupted(Exception):
    """The run was asked to stop. `fit()` catches this and writes a checkpoint; the same command resumes."""


class Diverged(Exception):
    """The loss or the gradient is not finite, or the loss is far above the loss of the untrained model."""


@dataclass(frozen=True)
class TrainingJob:
    """What to train and where: the inputs of `fit()`, the ranks of the run, and the stop request."""

    config: RunConfig
    machine: Machine
    folder: RunFolder
    world: World
    stop: StopRequest


@dataclass
class TrainingProgress:
    """The progress of a run: counters and losses, which every checkpoint contains."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # training tokens seen, without padding
    split: int = 1  # number of parts that each micro-batch is split into; doubles when memory runs out
    window_loss: float = 0.0  # sum of the losses since the last "train" row of metrics.jsonl
    window_steps: int = 0  # number of steps in `window_loss`
    first_loss: float | None = None  # loss of the untrained model
    running_loss: float = 0.0  # exponential moving average of the loss, to detect divergence
    last_loss: float | None = None
    grad_norm: float | None = None  # gradient norm of the last step
    validated: int = 0  # step of the last validation
    best: dict[str, Any] | None = None  # metrics of the best validation, with its step
    worse: int = 0  # number of validations since the best one
    stopped_early: bool = False

    def best_evaluation(self) -> Evaluation | None:
        """Return the scores of the best validation so far; None before the first validation."""
        if self.best is None:
            return None
        return Evaluation(self.best["loss"], self.best["n"], self.best.get("accuracy"))


@dataclass
class Training:
    """The complete state of one run on one process, which the training loop changes."""

    job: TrainingJob  # what to train, where, and on which processes
    prepared: Prepared  # data, task, tokenizer and model
    learner: Learner  # the model with its method, optimizer and precision
    recorder: Recorder  # what the run writes: log, metrics, status, step times
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    saved_at: tuple[int, int] | None = None  # (step, validated) of the last checkpoint

    @property
    def config(self) -> RunConfig:
        return self.job.config

    @property
    def folder(self) -> RunFolder:
        return self.job.folder

    @property
    def world(self) -> World:
        return self.job.world

    @property
    def total_steps(self) -> int:
        """The length of the run in optimizer steps: budget.steps or budget.epochs, whichever is shorter."""
        by_epochs = self.config.budget.epochs * self.prepared.task.steps_per_epoch
        return min(filter(None, (self.config.budget.steps, by_epochs)))

    @property
    def micro_rows(self) -> int:
        """The number of rows per micro-batch, summed over all ranks; it is halved when memory runs out."""
        return max(1, self.config.budget.batch_size // self.progress.split)

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.total_steps or self.progress.stopped_early

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint, latest.pt, contains exactly the current state."""
        return self.saved_at == (self.progress.step, self.progress.validated)

    @property
    def stop_reason(self) -> str:
        """Why the run must stop now, or "" if it may continue.

        A time limit counts only after this process has taken one step, so that every start makes progress.
        """
        stop = self.job.stop
        return stop.reason if stop.signalled or self.recorder.timer.steps_here else ""

    def check_stop(self) -> None:
        """Raise Interrupted if the run was asked to stop.

        With several ranks this does not raise, because `backward()` stops all ranks at the same step.
        """
        self.report_status()
        if self.world.size == 1 and self.stop_reason:
            raise Interrupted(self.stop_reason)

    def row(self, kind: str, **values: Any) -> None:
        """Append a row to metrics.jsonl: the current step, `kind` (such as "train") and `values`."""
        self.recorder.row(self.progress.step, kind, **values)

    def event(self, text: str) -> None:
        """Write `text`, which describes an event of the run, to metrics.jsonl and to training.log."""
        self.row("event", text=text)
        self.recorder.journal.line(f"step {self.progress.step}: {text}")

    def report_status(self, *, force: bool = False, **changes: Any) -> None:
        """Write the progress and `changes` to status.json; without `force`, at most every two seconds."""
        if not force and not self.recorder.status_is_due:
            return
        self.recorder.journal.progress(self.progress.step, self.total_steps, self.recorder.speed())
        p, metric, speed = self.progress, self.prepared.task.metric, self.recorder.timer.steps_per_second
        self.recorder.write_status(
            step=p.step,
            total_steps=self.total_steps,
            loss=p.last_loss,
            metric=BestMetric(metric, p.best[metric]) if p.best else None,
            steps_per_second=speed,
            eta_seconds=(self.total_steps - p.step) / speed if speed else None,
            **changes,
        )
