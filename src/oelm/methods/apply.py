"""`oelm.apply`: set the Q/K of any model as a method says and freeze them for real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.checks import (
    check_adapters,
    check_depth,
    check_extras,
    check_head_sizes,
    check_seed,
    check_ties,
    check_weights,
    warn_if_trained_weights_are_discarded,
)
from oelm.methods.install import install
from oelm.methods.method import Method
from oelm.methods.presets import find_method
from oelm.methods.reading.feed_forward import ffn_matrices
from oelm.methods.reading.find import qk_projections
from oelm.methods.reading.verify import check_reading
from oelm.methods.reading.wrappers import unwrap
from oelm.methods.record import (
    follow_schedule,
    modules_with_record,
    record_of,
    require_parameter,
    require_record,
)


def apply(
    model: nn.Module,
    method: str | Method,
    *,
    seed: int = 0,
    verify: bool = True,
    example_inputs: Any = None,
) -> Applied:
    """Give `model` the start and the frozen tensors of a method, in place.

    Build the optimizer after apply: a fused Q/K/V is replaced by one tensor per part, and an optimizer built
    before still holds the old one, so that V would never train. `oelm.audit(model, optimizer)` reports it.

    model: Any transformer whose attention oelm can read: Hugging Face models, torch's own, our GPT, or
        yours after `oelm.register_attention`. Apply after loading weights and after moving to a dtype:
        what is frozen is remembered byte by byte.
    method: A name of `oelm.methods()`, an alias, or an `oelm.Method`.
    seed: Decides every drawn tensor, each from its own stream.
    verify: Prove numerically, on a copy of each kind of attention, that what was read as Q and K is just that
        (see `oelm.methods.reading.verify`). False skips it; `oelm.audit` then says that it was skipped.
    example_inputs: A small batch that the model accepts (a dict, a tuple or a tensor), for models whose
        attention modules cannot be called without an example.

    >>> import torch
    >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> applied = apply(encoder, "oelm-freeze", seed=42)
    >>> applied.total, applied.frozen, applied.trainable  # 2 x (16 x 16 weights + 16 biases) are frozen
    (2224, 544, 1680)
    """
    chosen = find_method(method)
    check_seed(seed)
    model = unwrap(model)
    if (earlier := record_of(model)) is not None:
        raise OelmError(
            f"this model already carries method '{earlier.method.name}'; a second one would start from its "
            f"frozen weights. Build or load the model anew"
        )
    if parts := modules_with_record(model):
        raise OelmError(f"its part '{parts[0]}' already carries a method. Build or load the model anew")
    projections = qk_projections(model)
    matrices = ffn_matrices(model) if "ffn" in chosen.parts else []
    check_adapters(model, chosen, projections, matrices)
    check_depth(chosen, projections)
    check_head_sizes(chosen, projections)
    check_weights(chosen, projections, matrices)
    check_ties(model, chosen, projections, matrices)
    check_extras(chosen, projections)
    if verify and not chosen.touches_nothing:
        check_reading(model, projections, example_inputs)
    warn_if_trained_weights_are_discarded(model, chosen, projections)
    record = install(model, chosen, seed, init=True)
    record.verified = verify
    follow_schedule(model, record, 0.0)
    return Applied(model)


class Applied:
    """A model with a method on it: exact counts, and the schedule's one verb, `step`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self._record = require_record(model, "Applied")

    @property
    def method(self) -> Method:
        return self._record.method

    @property
    def seed(self) -> int:
        return self._record.seed

    @property
    def progress(self) -> float:
        """The share of the run that `step` was last told."""
        return self._record.progress

    @property
    def total(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def trainable(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def frozen(self) -> int:
        return self.total - self.trainable

    @property
    def qk_total(self) -> int:
        """Query and key weights, their biases, and all that the method adds (also the taps on v)."""
        return sum(size for size, _ in self._qk())

    @property
    def qk_trainable(self) -> int:
        return sum(size for size, trains in self._qk() if trains)

    def _qk(self) -> Iterator[tuple[int, bool]]:
        for projection in qk_projections(self.model):
            for window in (projection.weight, projection.bias):
                if window is not None:
                    yield window.size, window.parameter.requires_grad
        for name in self._record.extras:
            parameter = require_parameter(self.model, name)
            yield parameter.numel(), parameter.requires_grad

    def step(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Freeze and thaw what the schedule says at this step; True if anything changed.

        A pure function of (step, total_steps): call it before every optimizer step, or once after a resume
        (weights first, then this). `oelm.param_groups` lists tensors that thaw later from the start; without
        a gradient an optimizer neither steps, decays nor keeps state for them, so its layout never changes.
        Pass the optimizer to also drop the state of what freezes now.
        """
        if total_steps < 1 or not 0 <= step <= total_steps:
            raise UsageError(f"step {step} of {total_steps} is no position in a run")
        changed = follow_schedule(self.model, self._record, step / total_steps)
        for parameter in changed:
            if optimizer is not None and not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
        return bool(changed)

    def to_dict(self) -> dict[str, Any]:
        counts = ("total", "trainable", "frozen", "qk_total", "qk_trainable")
        return {
            "method": self.method.name,
            "seed": self.seed,
            **{name: getattr(self, name) for name in counts},
        }

    def __str__(self) -> str:
        share = 100 * self.frozen / max(self.total, 1)
        qk_share = 100 * self.qk_trainable / max(self.qk_total, 1)
        rows = [
            ("parameters", self.total, ""),
            ("trainable", self.trainable, ""),
            ("frozen", self.frozen, f"{share:.1f} % of all"),
            ("Q/K in all", self.qk_total, ""),
            ("Q/K trainable", self.qk_trainable, f"{qk_share:.1f} % of Q/K"),
        ]
        head = (
            f"{type(self.model).__name__} with {self.method.name} (seed {self.seed}): {self.method.purpose}"
        )
        return "\n".join(
            [head.rstrip(": "), *(f"  {what:<14}{n:>14,}  {note}".rstrip() for what, n, note in rows)]
        )

    __repr__ = __str__
