"""Parameter groups for any optimizer: weight decay, layer-wise learning rates, a learning rate for Q/K.

Tensors that stay frozen are left out. Tensors that are unfrozen later are included from the first step on.
This is safe because torch's optimizers skip parameters without a gradient. The groups are then the same at
every step, so that the optimizer state of any checkpoint can be loaded. If an optimizer applies weight decay
to a frozen tensor, `oelm.audit()` reports that the tensor has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.extended import IDENTITY_INIT, ExtendedProjection
from oelm.methods.reading.find import find_projections
from oelm.methods.reading.projection import Projection, is_stack
from oelm.methods.reading.select import ALL
from oelm.methods.reading.wrappers import plain_name, plain_parameters, unwrap
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
    layers = {p.place.module: p.place for p in projections if p.place.stack}
    if not layers:
        raise OelmError(
            f"layer_decay cannot be used: {type(model).__name__} has no list of layers. Leave it at 1.0"
        )
    names = list(plain_parameters(model))
    stacks = {
        plain_name(stack): [plain_name(member) for member in _members(unwrap(model), stack, layers)]
        for stack in dict.fromkeys(p.stack for p in layers.values())
    }
    begins = {s: next((i for i, n in enumerate(names) if n.startswith(f"{s}.")), 0) for s in stacks}
    bottom = max(len(members) for members in stacks.values()) + 1
    below: dict[str, int] = {}
    for i, name in enumerate(names):
        stack = next((s for s in stacks if name.startswith(f"{s}.")), None)
        if stack is not None:
            members = stacks[stack]
            own = next((n for n, m in enumerate(members) if name.startswith(f"{m}.")), None)
            # A part between the layers, such as Swin's patch merging, counts as part of the layer before it.
            before = below.get(names[i - 1], bottom) if i > begins[stack] else bottom
            below[name] = before if own is None else len(members) - own
            continue
        is_embedding = any(word in name for word in _EMBEDDINGS) and i < max(begins.values())
        if is_embedding or _is_front_end(unwrap(model), name, i, begins):
            below[name] = bottom
    return below


def _members(model: nn.Module, stack: str, layers: Iterable[str]) -> list[str]:
    """Return the names of all layers of a stack, also of those without attention (LFM2's convolutions).

    A member that contains a list of layers, such as a stage of Swin, is replaced by these layers.

    layers: The names of the layers with attention.
    """
    found: list[str] = []
    for key in model.get_submodule(stack)._modules:
        member = f"{stack}.{key}"
        inside = [name.removeprefix(f"{member}.") for name in layers if name.startswith(f"{member}.")]
        if not inside:
            found.append(member)
        for inner in dict.fromkeys(_outermost_list(model, member, path) for path in inside):
            found += _members(model, inner, layers)
    return found


def _outermost_list(model: nn.Module, member: str, path: str) -> str:
    """Return the name of the outermost list of layers in `member` that contains the layer `member.path`."""
    steps = path.split(".")
    around = (".".join([member, *steps[:n]]) for n in range(len(steps)))
    return next(name for name in around if is_stack(model.get_submodule(name)))


def _is_front_end(model: nn.Module, name: str, index: int, begins: dict[str, int]) -> bool:
    """Return whether a parameter is in a module with convolutions before the layers, such as Whisper's.

    The module is beside the layers or around them: it shares the longest part of its name with them.

    begins: For each list of layers, the index of its first parameter.
    """
    steps = name.split(".")[:-1]
    pairs = {stack: zip(steps, stack.split("."), strict=False) for stack in begins}
    shared = {stack: len(list(takewhile(lambda pair: pair[0] == pair[1], p))) for stack, p in pairs.items()}
    most = max(shared.values())
    if most == len(steps) or any(index > begins[stack] for stack, n in shared.items() if n == most):
        return False
    front_end = model.get_submodule(".".join(steps[: most + 1]))
    return any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in front_end.modules())
