"""Parameter groups for any optimizer: what decays, which layers learn slower, what rate Q/K get.

Tensors that are frozen for good are left out. Tensors that a schedule thaws later are in from the start:
without a gradient the optimizers of torch neither move, decay nor keep state for them, and the layout is the
same at every step of the run, so that an optimizer's state can be restored at any of them. An optimizer that
decays parameters without a gradient would change them; `oelm.audit` notices.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.extended import IDENTITY_INIT
from oelm.methods.reading.find import qk_projections
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
    """The groups of `torch.optim.AdamW(oelm.param_groups(model, lr=...))`, in a fixed order.

    Build the optimizer after `oelm.apply` (and after PEFT's get_peft_model): both replace modules.

    model: The model, or a wrapper around it such as PEFT's, whose own parameters then are in the groups.
    lr: Rate of everything not said otherwise.
    weight_decay: For matrices and embeddings; biases, norms and parts that start at the identity get none.
    layer_decay: Factor on the rate per layer below the top, embeddings below the first layer; 1 = off.
        With several stacks (encoder and decoder) each counts from its own top.
    qk_lr: Own rate of the query and key projections that train or thaw, before layer_decay; None = lr.
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
        rate = qk_lr if qk_lr is not None and name in queries_and_keys else lr
        rate *= layer_decay ** below.get(name, 0)
        decay = weight_decay if _decays(name, parameter) else 0.0
        group = groups.setdefault((rate, decay), {"params": [], "lr": rate, "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())


def _decays(name: str, parameter: nn.Parameter) -> bool:
    own = name.rpartition(".")[2]
    return parameter.ndim >= 2 and own not in (*IDENTITY_INIT, "relative_bias")


def _qk_names(model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in plain_parameters(model).items()}
    found = set()
    for projection in qk_projections(model):
        if projection.fused:
            raise OelmError(
                f"{projection.name} shares one tensor with V, so it cannot have a rate of its own (qk_lr). "
                f"A method that freezes, thaws or extends Q/K separates them"
            )
        windows = (projection.weight, projection.bias)
        found |= {names[id(window.parameter)] for window in windows if window is not None}
    return found


def _layers_below_top(model: nn.Module) -> dict[str, int]:
    """Layers below the top of each parameter: none for heads and final norms, most for embeddings."""
    layers = {p.place.module: p.place for p in qk_projections(model) if p.place.stack}
    if not layers:
        raise OelmError(f"layer_decay needs layers in a list; {type(model).__name__} has none with attention")
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
