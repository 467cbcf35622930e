"""One run, from its config to its results: set up, fit, validate, save.

    outcome = fit(config, "runs/paper/GPT-01/scale=mini/seed=42")

The same call goes on where an earlier one stopped, whatever stopped it, and ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from oelm.config.run_config import Machine, RunConfig
from oelm.errors import OelmError, UsageError
from oelm.runs.folder import EXIT_CODES, EXIT_PERMANENT, RunFolder, State, exit_code_of
from oelm.training.determinism import deterministic
from oelm.training.logs.results import write_results
from oelm.training.measure.attention import attention_statistics
from oelm.training.measure.memory import OutOfMemory, is_out_of_memory, storage_failure
from oelm.training.optimizer import clip_gradients, set_rate
from oelm.training.parallel.world import world_of
from oelm.training.run import Diverged, Interrupted, Run, random_state, set_random_state
from oelm.training.schedule import lr_factor
from oelm.training.setup import record_failure, set_up
from oelm.training.signals import StopRequest
from oelm.training.tasks.task import Batch, Evaluation, evaluate

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a call of `fit` ended; `exit_code` is what a launcher reads."""

    state: State
    reason: str = ""
    permanent: bool = False  # the same command fails again until the user changes something

    @property
    def exit_code(self) -> int:
        return EXIT_PERMANENT if self.permanent else EXIT_CODES[self.state]


def fit(config: RunConfig, folder: Path | str, machine: Machine = Machine()) -> Outcome:  # noqa: B008
    """Train `config` in `folder` until it is finished, interrupted, diverged or failed.

    A wrong config, or a folder that holds another one, raises UsageError; what befalls a run is returned.
    """
    place = RunFolder(folder)
    with (
        contextlib.closing(place),
        world_of(machine) as world,
        StopRequest(machine.time_limit) as stop,
        deterministic(world.device),
    ):
        if world.main:
            place.claim(config)
        world.barrier()
        before = place.ended()
        if before is not None:
            return Outcome(before.state, before.reason or f"was {before.state} before")
        run: Run | None = None
        try:
            run = set_up(config, machine, place, world, stop)
            outcome = _work(run)
            run.close(outcome.state, outcome.reason)
        except KeyboardInterrupt:  # the second one: at once, and the last checkpoint is what remains
            record_failure(place, world, run, "interrupted", "Ctrl-C, twice; run it again to go on")
            world.report_failure("interrupted", "Ctrl-C, twice")
            raise
        except Exception as error:
            outcome = _failure(error, run, place)
            record_failure(place, world, run, outcome.state, outcome.reason, traceback.format_exc())
            world.report_failure(outcome.state, outcome.reason)
            known = isinstance(error, OelmError | OSError) or outcome.state != "failed"
            if isinstance(error, UsageError) or not known:
                raise  # a wrong wish, or a fault of the program: both belong to whoever called
            return outcome
        if config.tune.trial and world.main and place.ended() is not None:
            with contextlib.suppress(OSError):  # only its validation figure is wanted; a grid's fill a disk
                place.drop_checkpoints()
        world.leave_together()
        return outcome


def _work(run: Run) -> Outcome:
    try:
        train(run)
        finish(run)
    except Interrupted as stopped:
        if not run.is_saved:  # it is when the test split was being scored, with the best model's weights
            run.save()
        return Outcome(
            "interrupted", f"stopped by {stopped} at step {run.progress.step}; run it again to go on"
        )
    except Diverged as error:
        run.event(f"diverged: {error}")
        return Outcome("diverged", str(error))
    return Outcome("finished")


def _failure(error: Exception, run: Run | None, folder: RunFolder) -> Outcome:
    if run is not None and run.smaller_next_time:  # said by this process, or by one this one then missed
        return Outcome(
            "interrupted",
            f"out of memory with micro-batches of {run.micro_rows} rows over {run.world.size} processes; "
            "run it again to go on with smaller ones",
        )
    if isinstance(error, Interrupted):  # nothing to save yet
        return Outcome("interrupted", f"stopped by {error} while preparing; run it again to go on")
    if reason := storage_failure(error, folder):
        return Outcome("interrupted", reason)
    if is_out_of_memory(error):
        return Outcome("oom", f"out of memory: {error}")
    if isinstance(error, OelmError):
        return Outcome("failed", str(error), permanent=exit_code_of(error) == EXIT_PERMANENT)
    return Outcome("failed", f"{type(error).__name__}: {error}")


def train(run: Run) -> None:
    """The loop. Every number it depends on is in `run.progress`, so it may start anywhere."""
    p = run.progress
    while True:
        if validation_due(run):
            validate(run)
        if checkpoint_due(run):
            run.save()
        if p.step >= run.total_steps or p.stopped_early:
            return
        with_less_memory(run, lambda: take_step(run))
        if p.step % run.config.budget.log_every == 0 or p.step == run.total_steps:
            log_step(run)
        run.show_progress()


def validation_due(run: Run) -> bool:
    p = run.progress
    return p.step > p.validated and (p.step % eval_every(run) == 0 or p.step == run.total_steps)


def checkpoint_due(run: Run) -> bool:
    p, every = run.progress, run.config.budget.checkpoint_every or eval_every(run)
    done = p.step >= run.total_steps or p.stopped_early
    return p.step > 0 and (p.step % every == 0 or done) and not run.is_saved


def eval_every(run: Run) -> int:
    """0 means once per epoch, or once at the end of a run that is counted in steps."""
    budget = run.config.budget
    return budget.eval_every or (run.prepared.task.steps_per_epoch if budget.epochs else run.total_steps)


def with_less_memory(run: Run, action: Callable[[], T]) -> T:
    """Do it; when memory runs out, again with micro-batches of half the rows and the same rows per step."""
    while True:
        before = random_state(run.world.device)
        try:
            return action()
        except (Interrupted, MemoryError, RuntimeError) as error:
            # The weights are those of the last whole step: nothing of a begun one may remain.
            run.optimizer.zero_grad(set_to_none=True)
            set_random_state(before, run.world.device)
            if not is_out_of_memory(error):
                raise
            if run.updating:
                raise OutOfMemory(
                    f"in the optimizer's update, where smaller micro-batches are no help: {error}"
                ) from error
            if run.micro_rows <= run.world.size:
                raise OutOfMemory(f"even with one row at a time: {error}") from error
            if run.world.size > 1:  # the others wait for this process' gradients: only a new start is common
                run.folder.want_split(2 * run.progress.split)
                raise OutOfMemory(str(error)) from error
        run.split_further(2 * run.progress.split)


def take_step(run: Run) -> None:
    """One optimizer step: schedule, gradients over all micro-batches, clip, update."""
    p, optim = run.progress, run.config.optim
    with run.timer.step(p.step) as facts:
        run.follow_schedule()
        rate = lr_factor(optim, p.step, run.total_steps)
        set_rate(run.optimizer, rate)
        batches = run.prepared.task.micro_batches(p.step, run.micro_rows)
        loss = backward(run, batches)
        run.scaler.unscale_(run.optimizer)
        norm = clip_gradients(run.model.parameters(), optim.clip)
        running = must_not_diverge(run, loss, norm)
        run.updating = True
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.updating = False
        run.optimizer.zero_grad(set_to_none=True)
        facts["tokens"] = sum(batch.tokens for batch in batches)
        facts["flops"], facts["full_flops"] = run.cost(batches)
    p.step += 1
    p.tokens += int(facts["tokens"])
    p.first_loss = loss if p.first_loss is None else p.first_loss
    p.running_loss, p.last_loss = running, loss
    p.window_loss += loss
    p.window_steps += 1
    p.grad_norm = norm if math.isfinite(norm) else None  # fp16 may overflow; the scaler skips that update
    run.tell_schedule()


def backward(run: Run, batches: list[Batch]) -> float:
    """Gradients of the mean loss over all rows of the step, however they are cut; returns that loss.

    Each part's summed loss is divided by the whole step's weight: 2 x 8 is 1 x 16, and padding, partial
    batches and the number of processes do not tilt the mean.
    """
    world = run.world
    weight = sum(batch.weight for batch in batches)
    total = torch.zeros((), device=world.device)
    for number, batch in enumerate(batches, 1):
        share = {name: part.to(world.device) for name, part in batch.take(world.share(batch.rows)).items()}
        with world.reducing(run.objective, last=number == len(batches)):
            with run.precision.autocast():
                loss = run.objective(share) / weight
            if not world.has_share(batch.rows):
                loss = loss * 0.0
            run.scaler.scale(loss * world.size).backward()  # averaging divides by the number of processes
        total += loss.detach()
        run.check_stop()
    summed, asked = world.sum([float(total), float(bool(run.stop_reason))])
    if asked and world.size > 1:  # every process stops at the same place
        raise Interrupted(run.stop_reason or "a signal to another process")
    return summed


def must_not_diverge(run: Run, loss: float, norm: float) -> float:
    """The slow mean of the loss with this step's; Diverged if it is no number, or far above the start's.

    An untrained network guesses; one whose mean loss is beyond twice that, and four nats more, has left
    every region from which training comes back.
    """
    p = run.progress
    last = "none" if p.last_loss is None else f"{p.last_loss:.4g}"
    where = f"at step {p.step + 1}; the last finite loss was {last}"
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} {where}")
    if not math.isfinite(norm) and not run.scaler.is_enabled():
        raise Diverged(f"the gradient became {norm} {where}")
    first = loss if p.first_loss is None else p.first_loss
    running = first if p.first_loss is None else 0.9 * p.running_loss + 0.1 * loss
    if running > 2 * first + 4:
        raise Diverged(f"the loss rose to {running:.4g}, from {first:.4g} before training, {where}")
    return running


def log_step(run: Run) -> None:
    p = run.progress
    loss = p.window_loss / max(1, p.window_steps)
    rate = run.config.optim.lr * lr_factor(run.config.optim, p.step - 1, run.total_steps)
    run.row("train", loss=loss, lr=rate, grad_norm=p.grad_norm, tokens=p.tokens)
    run.journal.line(f"step {p.step}/{run.total_steps}  loss {loss:.4f}  lr {rate:.3g}  {run.pace()}")
    p.window_loss, p.window_steps = 0.0, 0


def validate(run: Run) -> None:
    """Score the validation split, keep the best model, decide on an early stop."""
    p, task = run.progress, run.prepared.task
    with run.timer.validating():
        found = with_less_memory(run, lambda: score(run, "validation"))
        sample = next(task.eval_batches("validation", 4))
        layers = attention_statistics(run.model, sample.tensors, run.world.device)
    if not math.isfinite(found.loss):
        raise Diverged(f"the validation loss became {found.loss} at step {p.step}")
    figures = found.figures()
    # From here on nothing interrupts: rows, best model and counters belong together.
    p.validated = p.step
    run.row("validation", **figures)
    if layers:
        run.row("attention", layers=layers)
    better = found.better_than(p.best_evaluation())
    if better:
        p.best, p.worse = {**figures, "step": p.step}, 0
        run.save_best()
    else:
        p.worse += 1
    shown = f"{task.metric} {figures[task.metric]:.4f}{' (best so far)' if better else ''}"
    run.journal.line(f"step {p.step}/{run.total_steps}  validation loss {found.loss:.4f}  {shown}")
    if run.config.budget.patience and p.worse >= run.config.budget.patience:
        p.stopped_early = True
        run.event(f"stopped early: {p.worse} validations without improvement")
    run.pulse(force=True)


def score(run: Run, split: str) -> Evaluation:
    return evaluate(
        run.prepared.task,
        run.model,
        split,
        rows=run.micro_rows,
        world=run.world,
        precision=run.precision,
        tick=run.check_stop,
    )


def finish(run: Run) -> None:
    """Prove what was frozen, score the best model on the test split once, write the results."""
    run.audit("end")
    run.load_best()
    test = None
    if not run.config.tune.trial:  # a trial is judged on validation; the test split stays unseen
        test = with_less_memory(run, lambda: score(run, "test"))
    if run.world.main:
        write_results(run, test)
