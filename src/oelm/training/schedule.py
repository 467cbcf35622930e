"""The learning rate as a pure function of the step: nothing to save, nothing to overshoot after a resume."""

from __future__ import annotations

import math

from oelm.config.run_config import OptimConfig


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    return optim.warmup_steps or round(optim.warmup_share * total_steps)


def lr_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The share of the full rate used by the optimizer step that leads from `step` to `step + 1`.

    Linear warm-up that reaches 1 at the end of the warm-up, then cosine or linear down to `final_lr_share`.

    >>> optim = OptimConfig(schedule="linear", warmup_steps=2)
    >>> [lr_factor(optim, s, 6) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warm = warmup_steps(optim, total_steps)
    if step < warm:
        return (step + 1) / warm
    if optim.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warm) / max(1, total_steps - warm))
    decay = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.final_lr_share + (1.0 - optim.final_lr_share) * decay
