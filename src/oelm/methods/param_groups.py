"""Parameter groups for any optimizer: weight decay, layer-wise learning rates, a learning rate for Q/K.

Tensors that stay frozen are left out. Tensors that are unfrozen later are included from the first step on.
This is safe because torch's optimizers skip parameters without a gradient. The groups are then the same at
every step, so that the optimizer state of any checkpoint can be loaded. If an optimizer applies weight decay
to a frozen tensor, `oelm.audit()` reports that the tensor has changed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.extended import IDENTITY_INIT, ExtendedProjection
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
    """Return parameter groups for an optimizer: `torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))`.

    Build the optimizer after `oelm.apply()` and PEFT's `get_peft_model()`, because both replace modules.

    Args:
        model: The model, or a wrapper around it. The parameters of PEFT adapters are included.
        lr: The learning rate.
        weight_decay: Weight decay of matrices and embeddings. Biases, norms, convolutions, cores,
            temperatures and relative biases get none.
        layer_decay: Factor between the learning rates of a layer and the layer above it. Parameters above
            the layers, such as the head, have `lr`, the top layer layer_decay * lr, the layer below it
            layer_decay**2 * lr, and so on; embeddings count as the layer below the first. 1 = off. Layers of
            encoder and decoder are counted separately.
        qk_lr: Learning rate of the query and key projections and of the extras that a method added to them,
            before layer_decay; None means `lr`.
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("qk_lr", qk_lr or 0.0)):
        if not value >= 0:
            raise UsageError(f"{name} must be 0 or more, got {value}")
    if not 0 < layer_decay <= 1:
        raise UsageError(f"layer_decay must be greater than 0 and at most 1, got {layer_decay}")
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
                f"qk_lr cannot be used: {projection.name} shares one tensor with V, so it cannot have its "
                f"own learning rate. Leave qk_lr out, or use a method that freezes Q/K or adds extras to "
                f"them; such a method splits the tensor"
            )
        found |= {names[id(part.parameter)] for part in projection.slices}
        if isinstance(owner := projection.weight.owner, ExtendedProjection):  # adapters, biases, ...
            found |= {names[id(p)] for p in owner.parameters()}
    return found


def _layers_below_top(model: nn.Module) -> dict[str, int]:
    """Return {parameter name: position of its layer, counted from the top}; the top layer is 1.

    Embeddings count as the layer below the first. Parameters outside the layers are left out.
    """
    try:
        projections = find_projections(model, ALL)  # the layers do not depend on what the method selects
    except OelmError:  # a layer outside the selection is not recognised
        projections = _projections(model)
    layers = {p.place.module: p.place for p in projections if p.place.stack}
    if not layers:
        raise OelmError(
            f"layer_decay cannot be used: {type(model).__name__} has no list of layers. Leave it at 1.0"
        )
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
