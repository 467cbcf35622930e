"""Find the feed-forward (FFN) matrices of a model, for methods that act on them."""

from __future__ import annotations

from torch import nn

from oelm.errors import OelmError
from oelm.methods.reading.families import FFN_NAMES
from oelm.methods.reading.find import contains, find_projections
from oelm.methods.reading.projection import FeedForward, ParameterSlice, is_matrix, is_transposed
from oelm.methods.reading.select import ALL, Selection
from oelm.methods.reading.wrappers import base_layer, unwrap


def ffn_matrices(model: nn.Module, selection: Selection = ALL) -> list[FeedForward]:
    """Return the selected FFN matrices (up, gate and down) of the layers with attention.

    Raise OelmError if a selected layer with attention has none. The FFN of a layer without attention, such as
    a convolution layer of LFM2, and the MLP of a classification head are left out.
    """
    model = unwrap(model)
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        for ups, down in FFN_NAMES:
            if all(is_matrix(_get(module, path)) for path in (*ups, down)):
                found[name] = (*ups, down)
                break
    first_names = [f"{owner}.{paths[0]}" if owner else paths[0] for owner, paths in found.items()]
    _refuse_stacked_experts(model, selection)
    projections = find_projections(model, selection)
    attentions = {p.attention_name: p.place for p in projections}
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    nearest = [_attention_of(name, list(attentions), first_names, order) for name in first_names]
    layers = {(attentions[name].stack, attentions[name].layer) for name in nearest if name is not None}
    missing = [name for name, place in attentions.items() if (place.stack, place.layer) not in layers]
    if missing:
        known = ", ".join("+".join(ups) + "/" + down for ups, down in FFN_NAMES)
        raise OelmError(
            f"no feed-forward matrices found in the layer of {missing[0]} (and {len(missing) - 1} more). "
            f"Methods that freeze the FFN need matrices with one of these sets of names: {known}"
        )
    matrices = []
    for (owner, paths), attention in zip(found.items(), nearest, strict=True):
        if attention is None:
            continue
        for path in paths:
            name = f"{owner}.{path}" if owner else path
            matrix = base_layer(model.get_submodule(name))
            bias = None if matrix.bias is None else ParameterSlice(matrix, "bias")
            weight = ParameterSlice(matrix, "weight", is_transposed(matrix))
            matrices.append(FeedForward(name, attentions[attention], weight, bias))
    return [matrix for matrix in matrices if selection.includes(matrix.name)]


def _attention_of(ffn: str, attentions: list[str], ffns: list[str], order: dict[str, int]) -> str | None:
    """Return the last attention before an FFN in the same layer; None if its layer has no attention.

    The layer is the smallest module that contains the FFN and an attention. If a module inside it contains
    both an attention and another FFN, it is not one layer but contains layers.

    order: The position of each module in `model.named_modules()`.
    """
    around = ffn
    while not (inside := [name for name in attentions if contains(around, name)]):
        around = around.rpartition(".")[0]
    depth = len(around.split(".")) if around else 0
    for name in inside:
        child = ".".join(name.split(".")[: depth + 1])
        if child not in (around, name) and any(contains(child, other) for other in ffns):
            return None
    before = [name for name in inside if order[name] < order[ffn]]
    return before[-1] if before else inside[0]


def _refuse_stacked_experts(model: nn.Module, selection: Selection) -> None:
    """Raise OelmError if a selected module has FFN matrices of several experts in one 3-D parameter."""
    names = {path for ups, down in FFN_NAMES for path in (*ups, down)}
    for owner, module in model.named_modules():
        for own, parameter in module._parameters.items():
            name = f"{owner}.{own}" if owner else own
            if parameter is not None and parameter.dim() == 3 and own in names and selection.includes(name):
                raise OelmError(
                    f"{name} holds the FFN matrices of several experts in one tensor, which methods that act "
                    f"on the FFN do not support. Use a method that acts only on q and k, or leave the "
                    f"experts out with exclude="
                )


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
