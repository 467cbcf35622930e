"""Recognise that memory ran out, and repeat the optimizer step with smaller micro-batches.

The rows of an optimizer step stay the same; fewer of them go through the model at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from oelm.errors import OelmError
from oelm.training.determinism import random_state, set_random_state
from oelm.training.state import Interrupted, Training

T = TypeVar("T")

# Out-of-memory messages of torch's CPU allocator, which raises RuntimeError instead of OutOfMemoryError.
_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")


class OutOfMemory(OelmError):
    """Memory ran out, and this process cannot go on with smaller micro-batches; the message says why."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that CPU or GPU memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_MESSAGES)


def retry_with_less_memory(training: Training, action: Callable[[], T]) -> T:
    """Return `action()`; if memory runs out, halve the rows per micro-batch and call `action()` again."""
    learner, world = training.learner, training.world
    while True:
        before = random_state(world.device)
        try:
            return action()
        except (Interrupted, MemoryError, RuntimeError) as error:
            # Undo the unfinished action. The weights are unchanged, unless optimizer.step() raised the error.
            learner.optimizer.zero_grad(set_to_none=True)
            set_random_state(before, world.device)
            if not is_out_of_memory(error):
                raise
            if learner.in_update:
                raise OutOfMemory(
                    "memory ran out in the update of the optimizer, where smaller batches do not help: use a "
                    f"smaller model, or more memory ({error})"
                ) from error
            if training.micro_rows <= world.size:
                raise OutOfMemory(
                    "a training step does not fit into memory, even with one row at a time: use a smaller "
                    f"model or a smaller data.max_length ({error})"
                ) from error
            if world.size > 1:  # the other ranks are blocked in all-reduce, so the run must restart
                training.folder.want_split(2 * training.progress.split)
                raise OutOfMemory(str(error)) from error
        split_micro_batches(training, 2 * training.progress.split)


def split_micro_batches(training: Training, parts: int) -> None:
    """Split every micro-batch of `budget.batch_size` rows into `parts` parts from now on, and log it."""
    training.progress.split = parts
    if training.world.device.type == "cuda":
        torch.cuda.empty_cache()
    training.event(
        f"out of memory: micro-batches now have {training.micro_rows} rows; the rows per step are unchanged"
    )


def restart_with_smaller_batches(training: Training) -> bool:
    """Return whether a rank that ran out of memory has asked to restart with smaller micro-batches."""
    return training.world.size > 1 and training.folder.wanted_split() > training.progress.split
