"""AdamW on what trains: built from the method's groups, saved by parameter name.

State by name rather than by position: a checkpoint says which tensor it belongs to, and what is frozen
for good simply has none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from oelm.config.run_config import OptimConfig
from oelm.errors import OelmError
from oelm.methods.param_groups import param_groups
from oelm.methods.reading.projection import full_tensor

OptimizerState = dict[str, dict[str, Tensor]]


def build_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over the groups of the applied method; each group remembers its full rate."""
    groups = param_groups(
        model,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        layer_decay=optim.layer_decay,
        qk_lr=optim.qk_lr or None,
    )
    if not groups:
        raise OelmError("nothing in this model trains under this method")
    for group in groups:
        group["full_lr"] = group["lr"]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * factor


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale the gradients to a global norm of at most `limit` (0 = leave them); returns the norm before."""
    held = [p for p in parameters if p.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]))
    if limit > 0:
        nn.utils.clip_grads_with_norm_(held, limit, norm)
    return float(norm)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: dict(values) for p, values in optimizer.state.items() if values}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Put a saved state back in place, bit by bit; a tensor it does not know is an error."""
    parameters = dict(model.named_parameters())
    for name, values in state.items():
        if name not in parameters:
            raise OelmError(f"the checkpoint has optimizer state for '{name}', which this model lacks")
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: value.to(parameter.device).clone() for key, value in values.items()
        }
