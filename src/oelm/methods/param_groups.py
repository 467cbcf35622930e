"""Parameter groups for any optimizer: weight decay, layer-wise learning rates, a learning rate for Q/K.

Tensors that stay frozen are left out. Tensors that are unfrozen later are included from the first step on.
This is safe because torch's optimizers skip parameters without a gradient. The groups are then the same at
every step, so that the optimizer state of any checkpoint can be loaded. If an optimizer applies weight decay
to a frozen tensor, `oelm.audit()` reports that the tensor has changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import accumulate
from typing import Any

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.extended import IDENTITY_INIT, ExtendedProjection
from oelm.methods.reading.find import find_projections
from oelm.methods.reading.projection import Projection
from oelm.methods.reading.select import ALL
from oelm.methods.reading.wrappers import plain_name, plain_parameters, unwrap
from oelm.methods.record import record_of

_EMBEDDINGS = ("embed", "wte", "wpe", "tokens", "positions", "shared", "patch", "cls_token")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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
            layer_decay**2 * lr, and so on; embeddings, and convolutions before the layers, count as the layer
            below the first. 1 = off. Layers of encoder and decoder are counted separately.
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

    Embeddings and convolutions before the layers count as the layer below the first. Other parameters
    outside the layers are left out.
    """
    try:
        projections = find_projections(model, ALL)  # the layers do not depend on what the method selects
    except OelmError:  # a layer outside the selection is not recognised
        projections = _projections(model)
    layers = {plain_name(p.place.module): plain_name(p.place.stack) for p in projections if p.place.stack}
    if not layers:
        raise OelmError(
            f"layer_decay cannot be used: {type(model).__name__} has no list of layers. Leave it at 1.0"
        )
    parameters = plain_parameters(model)
    numbers = {stack: _layer_numbers(stack, layers, parameters) for stack in layers.values()}
    below = {name: max(own.values()) + 1 - n for own in numbers.values() for name, n in own.items()}
    bottom = max(below.values()) + 1
    order = {name: i for i, name in enumerate(parameters)}
    begins = {stack: order[next(iter(own))] for stack, own in numbers.items()}
    around = {prefix for stack in begins for prefix in _prefixes(stack)}
    modules = unwrap(model).named_modules()
    convolutions = [plain_name(name) for name, module in modules if isinstance(module, _CONVOLUTIONS)]
    # Largest modules that contain convolutions but no list of layers, such as Wav2Vec2's feature extractor.
    front_ends = {_first_outside(around, name) for name in convolutions}
    for name in parameters.keys() - below.keys():
        is_embedding = any(word in name for word in _EMBEDDINGS) and order[name] < max(begins.values())
        part = _first_outside(around, name)
        beside = [i for stack, i in begins.items() if part.rpartition(".")[0] in ("", *_prefixes(stack))]
        if is_embedding or (part in front_ends and order[name] < min(beside)):
            below[name] = bottom
    return below


def _layer_numbers(stack: str, layers: Iterable[str], parameters: Iterable[str]) -> dict[str, int]:
    """Return {parameter name: number of its layer} for one list of layers; the first layer is 1.

    Layers without attention count, too, such as LFM2's convolutions. If the list contains stages, as in Swin,
    the layers in the stages are counted. A part between layers, such as Swin's patch merging, has the number
    of the layer before it.

    layers: The names of the layers with attention.
    """
    inside = [layer for layer in layers if layer.startswith(f"{stack}.")]
    lists = {stack, *(layer.rpartition(".")[0] for layer in inside)}
    around = {prefix for layer in inside for prefix in _prefixes(layer)[:-1]}
    numbers: dict[str, int] = {}
    seen = set()
    for name in parameters:
        if name.startswith(f"{stack}."):
            part = _first_outside(around, name)
            if part.rpartition(".")[0] in lists:
                seen.add(part)
            numbers[name] = len(seen)
    return numbers


def _first_outside(around: Container[str], name: str) -> str:
    """Return the shortest prefix of the dotted `name` that is not in `around`."""
    return next((prefix for prefix in _prefixes(name) if prefix not in around), name)


def _prefixes(name: str) -> list[str]:
    """Return ["a", "a.b", "a.b.c"] for "a.b.c"."""
    return list(accumulate(name.split("."), "{}.{}".format))
