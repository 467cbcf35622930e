"""The Hugging Face Trainer among interleaved arms: it runs its own loop, so it is held between turns."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

# wait() sleeps until the next turn is asked for (False: no more), answer(...) reports it
Drives = Callable[[Callable[[], bool], Callable[[dict[str, Any]], None]], None]


class Clock:
    """Seconds on the wall, and of all cores in this process: those barely mind a busy machine."""

    def __init__(self) -> None:
        self._wall, self._cores = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._wall,
            "cpu_seconds": time.process_time() - self._cores,
        }


def trainer_in_turns(model: Any, rows: Any, batch: int, *, steps: int = 1, **options: Any) -> Drives:
    """`steps` optimizer steps per turn of a Trainer with fused AdamW and clipping at 1.0, as ours has.

    Nothing is logged, saved or shown. `options` are more TrainingArguments, and data_collator.
    """

    def drives(wait: Callable[[], bool], answer: Callable[[dict[str, Any]], None]) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Turns(TrainerCallback):
            clock: Clock | None = None
            done = 0

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                if self.clock is None:
                    self.hold()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                self.done += 1
                if self.done % steps == 0:
                    assert self.clock is not None
                    answer(self.clock.read())
                    self.hold()

            def hold(self) -> None:
                if not wait():
                    os._exit(0)  # the Trainer has no gentle way to leave a step
                self.clock = Clock()

        own = {name: options.pop(name) for name in ("data_collator",) if name in options}
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=100_000,
                learning_rate=3e-4,
                optim="adamw_torch_fused",
                max_grad_norm=1.0,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
                **options,
            )
            Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Turns()], **own).train()

    return drives
