"""Find the feed-forward matrices of a model, for the methods that freeze them."""

from __future__ import annotations

from torch import nn

from oelm.errors import OelmError
from oelm.methods.reading.find import qk_projections
from oelm.methods.reading.projection import (
    FeedForward,
    ParameterSlice,
    is_matrix,
    is_transposed,
    layer_places,
)
from oelm.methods.reading.wrappers import base_layer, unwrap

#: (matrices that read the residual stream, the matrix that writes to it), as attribute paths of one module.
NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("w1", "w3"), "w2"),
    (("up",), "down"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("ffn",), "ffn_output"),
    (("ffn.0",), "ffn.2"),
    (("intermediate.dense",), "output.dense"),
)


def ffn_matrices(model: nn.Module) -> list[FeedForward]:
    """Return the up, gate and down matrices of every layer with attention; an error if a layer has none."""
    model = unwrap(model)
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        for ups, down in NAMES:
            if all(is_matrix(_get(module, path)) for path in (*ups, down)):
                found[name] = (*ups, down)
                break
    first_names = [f"{owner}.{paths[0]}" if owner else paths[0] for owner, paths in found.items()]
    places = layer_places(model, first_names)
    layers = {(place.stack, place.layer) for place in places.values()}
    attentions = {p.attention_name: (p.place.stack, p.place.layer) for p in qk_projections(model)}
    missing = [name for name, layer in attentions.items() if layer not in layers]
    if missing:
        raise OelmError(
            f"no feed-forward matrices found in the layer of {missing[0]} (and {len(missing) - 1} more): "
            f"methods that freeze the FFN know the names {', '.join('+'.join(u) + '/' + d for u, d in NAMES)}"
        )
    matrices = []
    for (owner, paths), place in zip(found.items(), places.values(), strict=True):
        for path in paths:
            name = f"{owner}.{path}" if owner else path
            matrix = base_layer(model.get_submodule(name))
            bias = None if matrix.bias is None else ParameterSlice(matrix, "bias")
            weight = ParameterSlice(matrix, "weight", is_transposed(matrix))
            matrices.append(FeedForward(name, place, weight, bias))
    return matrices


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
