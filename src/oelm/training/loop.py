"""The training loop: take optimizer steps, validate, save, and score the best model on the test split."""

from __future__ import annotations

import math

import torch

from oelm.errors import OelmError
from oelm.methods.audit import audit
from oelm.training.checkpoints.best import load_best, save_best
from oelm.training.checkpoints.resume import save_training
from oelm.training.logs.results import write_results
from oelm.training.measure.attention import attention_statistics
from oelm.training.optimizer import clip_gradients, lr_factor, set_learning_rate
from oelm.training.out_of_memory import retry_with_less_memory
from oelm.training.state import Diverged, Interrupted, Training
from oelm.training.tasks.task import Batch, Evaluation, evaluate


def train(training: Training) -> None:
    """Train until the last step of the budget, or until early stopping.

    All counters are in `training.progress`, so that a resumed run continues the loop at any step.
    """
    while True:
        if validation_is_due(training):
            validate(training)
        if checkpoint_is_due(training):
            save_training(training)
        if training.is_done:
            return
        retry_with_less_memory(training, lambda: take_step(training))
        log_step(training)


def validation_is_due(training: Training) -> bool:
    p = training.progress
    at_interval = p.step % eval_interval(training) == 0 or p.step == training.total_steps
    return p.step > p.validated and at_interval


def checkpoint_is_due(training: Training) -> bool:
    step = training.progress.step
    interval = training.config.budget.checkpoint_every or eval_interval(training)
    return step > 0 and (step % interval == 0 or training.is_done) and not training.is_saved


def eval_interval(training: Training) -> int:
    """Return the number of optimizer steps between two validations.

    eval_every=0 means one validation per epoch, or one at the end if the budget has no epochs.
    """
    budget = training.config.budget
    once = training.prepared.task.steps_per_epoch if budget.epochs else training.total_steps
    return budget.eval_every or once


def take_step(training: Training) -> None:
    """Take one optimizer step: apply the schedules, sum the gradients of all micro-batches, clip, update."""
    p, optim, learner = training.progress, training.config.optim, training.learner
    with training.recorder.timer.step(p.step) as facts:
        learner.follow_schedule(p.step, training.total_steps)
        set_learning_rate(learner.optimizer, lr_factor(optim, p.step, training.total_steps))
        batches = training.prepared.task.micro_batches(p.step, training.micro_rows)
        loss = backward(training, batches)
        learner.scaler.unscale_(learner.optimizer)
        norm = clip_gradients(learner.optimizer, optim.clip)
        running_loss = check_divergence(training, loss, norm)
        learner.in_update = True
        learner.scaler.step(learner.optimizer)
        learner.scaler.update()
        learner.in_update = False
        learner.optimizer.zero_grad(set_to_none=True)
        facts["tokens"] = sum(batch.tokens for batch in batches)
        facts["flops"], facts["full_flops"] = learner.step_flops(batches)
    p.step += 1
    p.tokens += int(facts["tokens"])
    p.first_loss = loss if p.first_loss is None else p.first_loss
    p.running_loss, p.last_loss = running_loss, loss
    p.window_loss += loss
    p.window_steps += 1
    p.grad_norm = norm if math.isfinite(norm) else None  # not finite if fp16 overflows in this step
    # Reported after the step, because a step that runs out of memory is repeated and would report it twice.
    if learner.schedule_changed:
        training.event(
            f"the method's schedule has frozen or unfrozen parameters: {learner.applied.trainable:,} "
            "parameters are trainable now"
        )
        learner.schedule_changed = False


def backward(training: Training, batches: list[Batch]) -> float:
    """Compute the gradients of the mean loss over all rows of an optimizer step; return the mean loss.

    The summed loss of each micro-batch is divided by the total weight (target tokens or rows) of the step. So
    two micro-batches of 8 rows give the same gradients as one of 16 rows, for any padding, number of rows and
    number of ranks.
    """
    learner, world = training.learner, training.world
    weight = sum(batch.weight for batch in batches)
    total = torch.zeros((), device=world.device)
    for number, batch in enumerate(batches, 1):
        rows = {name: part.to(world.device) for name, part in batch.take(world.own_rows(batch.rows)).items()}
        with world.sync_gradients(learner.objective, last=number == len(batches)):
            with learner.precision.autocast():
                loss = learner.objective(rows) / weight
            if not world.has_rows(batch.rows):
                loss = loss * 0.0
            # DDP and FSDP divide the gradients by the number of ranks, but the sum over the ranks is needed.
            learner.scaler.scale(loss * world.size).backward()
        total += loss.detach()
        training.check_stop()
    summed, stops = world.sum([float(total), float(bool(training.stop_reason))])
    if stops and world.size > 1:  # if one rank must stop, all ranks stop at this step
        raise Interrupted(training.stop_reason or "a signal to another process")
    return summed


def check_divergence(training: Training, loss: float, norm: float) -> float:
    """Return the moving average of the loss, including this step; raise Diverged if training has diverged.

    Training has diverged if the loss or the gradient norm is not finite, or if the moving average exceeds
    twice the first loss plus 4 nats, from where training does not recover. The first loss of a run is the
    loss of the untrained model.
    """
    p = training.progress
    last = "none" if p.last_loss is None else f"{p.last_loss:.4g}"
    where = f"at step {p.step + 1}; the last finite loss was {last}"
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} {where}")
    if not math.isfinite(norm) and not training.learner.scaler.is_enabled():
        raise Diverged(f"the gradient norm became {norm} {where}")
    first = loss if p.first_loss is None else p.first_loss
    running_loss = first if p.first_loss is None else 0.9 * p.running_loss + 0.1 * loss
    if running_loss > 2 * first + 4:
        raise Diverged(f"the loss rose from {first:.4g} before training to {running_loss:.4g} {where}")
    return running_loss


def log_step(training: Training) -> None:
    """Update the progress bar; every `log_every` steps, write the mean loss to metrics.jsonl and the log."""
    p, recorder, total = training.progress, training.recorder, training.total_steps
    if p.step % training.config.budget.log_every == 0 or p.step == total:
        optim = training.config.optim
        loss, lr = p.window_loss / max(1, p.window_steps), optim.lr * lr_factor(optim, p.step - 1, total)
        training.row("train", loss=loss, lr=lr, grad_norm=p.grad_norm, tokens=p.tokens)
        recorder.timer.record_memory(p.step - 1)
        recorder.journal.line(f"step {p.step}/{total}  loss {loss:.4f}  lr {lr:.3g}  {recorder.speed()}")
        p.window_loss, p.window_steps = 0.0, 0
    recorder.journal.progress(p.step, total, recorder.speed())
    training.report_status()


def validate(training: Training) -> None:
    """Score the validation split, save the model if it is the best so far, and decide on early stopping."""
    p, task = training.progress, training.prepared.task
    with training.recorder.timer.validating():
        found = retry_with_less_memory(training, lambda: score(training, "validation"))
        sample = next(task.eval_batches("validation", 4))
        layers = attention_statistics(training.learner.model, sample.tensors, training.world.device)
    if not math.isfinite(found.loss):
        raise Diverged(f"the validation loss became {found.loss} at step {p.step}")
    metrics = found.metrics()
    # From here to the end, stop requests are not checked: a stop in between would leave metrics.jsonl, the
    # best model and the counters inconsistent.
    p.validated = p.step
    training.row("validation", **metrics)
    if layers:
        training.row("attention", layers=layers)
    best = p.best_evaluation()
    if training.config.tune.trial and best is not None:
        is_best = found.loss < best.loss  # tuning compares losses, so a trial reports its lowest one
    else:
        is_best = found.better_than(best)
    if is_best:
        p.best, p.worse = {**metrics, "step": p.step}, 0
        save_best(training)
    else:
        p.worse += 1
    note = " (best so far)" if is_best else ""
    training.recorder.journal.line(
        f"step {p.step}/{training.total_steps}  validation loss {found.loss:.4f}  "
        f"{task.metric} {metrics[task.metric]:.4f}{note}"
    )
    patience = training.config.budget.patience
    if patience and p.worse >= patience:
        p.stopped_early = True
        training.event(f"stopped early: {p.worse} validations without improvement")
    training.report_status(force=True)


def score(training: Training, split: str) -> Evaluation:
    """Return the scores of the model, with its current weights, on a split."""
    return evaluate(
        training.prepared.task,
        training.learner.model,
        split,
        rows=training.micro_rows,
        world=training.world,
        precision=training.learner.precision,
        after_batch=training.check_stop,
    )


def finish(training: Training) -> None:
    """Audit the frozen parameters, score the best model on the test split, and write the results."""
    audit_freezing(training, "end")
    load_best(training)
    test = None
    if not training.config.tune.trial:  # a tuning trial must not use the test split
        test = retry_with_less_memory(training, lambda: score(training, "test"))
    if training.world.is_main:
        write_results(training, test)


def audit_freezing(training: Training, when: str) -> None:
    """Raise OelmError if a frozen parameter has changed; write what was checked to freeze_audit.json.

    `when` is "start" or "end" of the run.
    """
    report = audit(training.learner.model, training.learner.optimizer)
    training.recorder.write_audit(when, report.to_dict())
    if not report.ok:
        raise OelmError(
            f"the freeze audit at the {when} of the run failed, so its results would not be valid: {report}"
        )
