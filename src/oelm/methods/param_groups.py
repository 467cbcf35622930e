"""Parameter groups for any optimizer: weight decay, layer-wise learning rates, a learning rate for Q/K.

Tensors that stay frozen are left out. Tensors that thaw later are included from the first step on. This is
safe because torch's optimizers skip parameters without a gradient. The groups are then the same at every
step, so that the optimizer state of any checkpoint fits. If an optimizer decays parameters without a
gradient, `oelm.audit` reports it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.extended import IDENTITY_INIT
from oelm.methods.reading.find import find_projections
from oelm.methods.reading.projection import Projection
from oelm.methods.reading.select import ALL
from oelm.methods.reading.wrappers import plain_parameters
from oelm.methods.record import record_of

_EMBEDDINGS = ("embed", "wte", "wpe", "tokens", "positions", "shared", "patch", "cls_token")


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    layer_decay: float = 1.0,
    qk_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups, as for `torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))`.

    Build the optimizer after `oelm.apply` (and after PEFT's get_peft_model): both replace modules.

    Args:
        model: The model, or a wrapper around it such as PEFT's; its adapter parameters are included.
        lr: The learning rate.
        weight_decay: For matrices and embeddings; biases, norms and extras with an identity init get none.
        layer_decay: Factor on the learning rate per layer below the top; embeddings count as the layer below
            the first. 1 = off. Encoder and decoder count from their own top.
        qk_lr: Learning rate of the query and key projections that train or thaw, before layer_decay; None
            means lr.
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("qk_lr", qk_lr or 0.0)):
        if not value >= 0:
            raise UsageError(f"{name} must not be negative, got {value}")
    if not 0 < layer_decay <= 1:
        raise UsageError(f"layer_decay must lie in (0, 1], got {layer_decay}")
    record = record_of(model)
    records = record.tensors if record else {}
    queries_and_keys = _qk_names(model) if qk_lr is not None else set()
    below = _layers_below_top(model) if layer_decay != 1.0 else {}
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in plain_parameters(model).items():
        thaws = name in records and records[name].ever_frozen and records[name].ever_trained
        if not parameter.requires_grad and not thaws:
            continue
        own_lr = qk_lr if qk_lr is not None and name in queries_and_keys else lr
        own_lr *= layer_decay ** below.get(name, 0)
        decay = weight_decay if _decays(name, parameter) else 0.0
        group = groups.setdefault((own_lr, decay), {"params": [], "lr": own_lr, "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())


def _decays(name: str, parameter: nn.Parameter) -> bool:
    own = name.rpartition(".")[2]
    return parameter.ndim >= 2 and own not in (*IDENTITY_INIT, "relative_bias")


def _projections(model: nn.Module) -> list[Projection]:
    record = record_of(model)
    return find_projections(model, record.selection if record else ALL)


def _qk_names(model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in plain_parameters(model).items()}
    found = set()
    for projection in _projections(model):
        if projection.fused:
            raise OelmError(
                f"{projection.name} shares one tensor with V, so it cannot have its own learning rate "
                f"(qk_lr). Leave qk_lr out, or use a method that freezes Q/K or adds extras to them, which "
                f"splits the tensor"
            )
        found |= {names[id(part.parameter)] for part in projection.slices}
    return found


def _layers_below_top(model: nn.Module) -> dict[str, int]:
    """Return how many layers below the output each parameter is: 1 for the top layer, most for embeddings."""
    layers = {p.place.module: p.place for p in _projections(model) if p.place.stack}
    if not layers:
        raise OelmError(f"layer_decay needs a list of attention layers; {type(model).__name__} has none")
    names = list(plain_parameters(model))
    stacks_begin = {
        place.stack: next(i for i, name in enumerate(names) if name.startswith(f"{place.stack}."))
        for place in layers.values()
    }
    below = {}
    for i, name in enumerate(names):
        place = next((p for module, p in layers.items() if name.startswith(f"{module}.")), None)
        if place is not None:
            below[name] = place.depth - place.layer
        elif any(word in name for word in _EMBEDDINGS) and i < max(stacks_begin.values()):
            below[name] = max(p.depth for p in layers.values()) + 1
    return below
