"""AdamW and the learning-rate schedule.

The learning rate is a pure function of the step, so a resumed run needs no saved scheduler state. The
optimizer state is saved by parameter name; frozen parameters have no optimizer state.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from oelm.config.run_config import OptimConfig
from oelm.errors import OelmError
from oelm.methods.param_groups import param_groups
from oelm.methods.reading.projection import full_tensor

OptimizerState = dict[str, dict[str, Tensor]]  # parameter name -> name of the state, e.g. "exp_avg" -> tensor


class AdamW(torch.optim.AdamW):
    """torch's AdamW without its decorators for torch.compile, which import the compiler in the first step.

    That import takes almost as long as `import torch`. The updates are the same. The training loop never
    compiles the optimizer.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, optim: OptimConfig) -> AdamW:
    """Return a fused AdamW optimizer for the parameters of `model` that the applied method leaves trainable.

    Each parameter group has its peak learning rate as `full_lr`. `set_learning_rate()` sets `lr` from it.
    """
    groups = param_groups(
        model,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        layer_decay=optim.layer_decay,
        qk_lr=optim.qk_lr or None,
    )
    if not groups:
        raise OelmError(
            "the method freezes every parameter of the model, so there is nothing to train: choose a method "
            "that leaves parameters trainable"
        )
    for group in groups:
        group["full_lr"] = group["lr"]
    return AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Return the number of warm-up steps.

    This is `optim.warmup_steps`; if it is 0, the fraction `optim.warmup_share` of `total_steps`.
    """
    return optim.warmup_steps or round(optim.warmup_share * total_steps)


def lr_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the factor by which the peak learning rate is multiplied in optimizer step `step` (from 0).

    The factor rises linearly to 1 during the warm-up. With the schedules "linear" and "cosine", it then falls
    to `final_lr_share` at the last step.

    >>> optim = OptimConfig(schedule="linear", warmup_steps=2)
    >>> [lr_factor(optim, s, 6) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warm = warmup_steps(optim, total_steps)
    if step < warm:
        return (step + 1) / warm
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warm) / max(1, total_steps - warm))
    decay = 1.0 - done if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.final_lr_share + (1.0 - optim.final_lr_share) * decay


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every parameter group to `factor` times its peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Scale the gradients of all parameters of `optimizer` to a global norm of at most `max_norm`.

    max_norm: 0 = no limit

    Return the original norm.
    """
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]))
    value = float(norm)
    # torch multiplies all gradients even if the factor is 1. `not <`, so that nan reaches the gradients; 1e-3
    # leaves room for torch's rounding of the factor.
    if max_norm > 0 and not value < max_norm - 1e-3:
        nn.utils.clip_grads_with_norm_(held, max_norm, norm)
    return value


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the state of `optimizer` as {parameter name: {name of the state, e.g. "exp_avg": tensor}}."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: dict(values) for p, values in optimizer.state.items() if values}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Load the result of `optimizer_state()`; raise OelmError if the model lacks one of its parameters."""
    parameters = dict(model.named_parameters())
    for name, values in state.items():
        if name not in parameters:
            raise OelmError(
                f"the checkpoint has optimizer state for the parameter '{name}', which this model does not "
                "have. The checkpoint was probably written with a different model or method: start over in "
                "another folder"
            )
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.to(parameter.device).clone() for key, value in values.items()
        }
