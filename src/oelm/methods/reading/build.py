"""Build the `Projection` objects of an attention module from its `AttentionSpec`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.extras.split import SplitMultiheadAttention, SplitProjection
from oelm.methods.reading.families import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, AttentionSpec
from oelm.methods.reading.projection import ParameterSlice, Place, Projection, RowLayout, is_transposed
from oelm.methods.reading.wrappers import base_layer


class _Found(NamedTuple):
    """A projection that `build_projections()` has found, before its number of heads is known."""

    role: str
    path: str
    weight: ParameterSlice
    bias: ParameterSlice | None
    head_dim: int | None  # None if the common head size of the attention module applies


def build_projections(model: nn.Module, name: str, spec: AttentionSpec, place: Place) -> list[Projection]:
    """Return the query and key projections of the attention module `name`, which `spec` describes."""
    module = model.get_submodule(name)
    if isinstance(module, nn.MultiheadAttention):
        return _multihead_projections(name, module, place)
    found = [*_separate(name, module, spec), *_fused(model, name, module, spec)]
    q_rows = next((f.weight.rows for f in found if f.role == "q" and f.head_dim is None), 0)
    common_head_dim = _head_dim(model, name, module, spec, q_rows) if q_rows else 0
    num_heads = q_rows // common_head_dim if q_rows else 0
    projections = []
    for role, path, weight, bias, head_dim in found:
        full_name = f"{name}.{path}" if name else path
        if path in spec.per_head:
            head_dim = _divide(full_name, weight.rows, num_heads)
        head_dim = head_dim or common_head_dim
        heads = _divide(full_name, weight.rows, head_dim)
        projections.append(Projection(full_name, role, heads, head_dim, place, module, name, weight, bias))
    return projections


def _separate(name: str, module: nn.Module, spec: AttentionSpec) -> list[_Found]:
    found = []
    for role, path in [("q", path) for path in spec.q] + [("k", path) for path in spec.k]:
        weight, bias = _unfused_slices(name, module, path)
        found.append(_Found(role, path, weight, bias, spec.head_dims.get(path)))
    return found


def _fused(model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec) -> list[_Found]:
    parts = [(part.name, part.layout, part.head_dims) for part in spec.parts]
    if spec.fused:
        fused = _child(name, module, spec.fused)
        is_split = isinstance(fused, SplitProjection)
        layout = fused.layout if is_split else _row_layout(model, name, module, spec, fused)
        parts.append((spec.fused, layout, {}))
    found = []
    for path, layout, head_dims in parts:
        fused = _child(name, module, path)
        for role in (r for r in layout.roles if r in ("q", "k")):
            if isinstance(fused, SplitProjection):
                weight, bias = _unfused_slices(name, module, f"{path}.{role}")
            else:
                weight = ParameterSlice(fused, "weight", is_transposed(fused), layout, role)
                bias = None if fused.bias is None else ParameterSlice(fused, "bias", False, layout, role)
            if role == "q" and spec.q_bias:
                bias = ParameterSlice(module, spec.q_bias)
            found.append(_Found(role, f"{path}.{role}", weight, bias, head_dims.get(role)))
    return found


def _child(name: str, module: nn.Module, path: str) -> Any:
    """Return the module or parameter at `path`, an attribute path inside the attention module `name`."""
    found: Any = module
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, nn.Module | nn.Parameter):
        raise OelmError(
            f"{name or 'the model'} ({type(module).__name__}) has no attribute '{path}', which was passed to "
            f"register_attention. Register the class again with the name of an existing attribute"
        )
    return base_layer(found) if isinstance(found, nn.Module) else found


def _unfused_slices(name: str, module: nn.Module, path: str) -> tuple[ParameterSlice, ParameterSlice | None]:
    """Return the weight and the bias (or None) of a projection that is not part of a fused matrix."""
    child = _child(name, module, path)
    if isinstance(child, nn.Parameter):
        owner, _, attribute = path.rpartition(".")
        return ParameterSlice(module.get_submodule(owner), attribute, transposed=True), None
    weight = ParameterSlice(child, "weight", is_transposed(child))
    return weight, None if getattr(child, "bias", None) is None else ParameterSlice(child, "bias")


def _multihead_projections(name: str, module: nn.MultiheadAttention, place: Place) -> list[Projection]:
    """Return the query and key projections of torch's MultiheadAttention.

    Its weights are packed into one tensor, separate, or split by oelm.
    """
    width, split = module.embed_dim, isinstance(module, SplitMultiheadAttention)
    packed = RowLayout(("q", "k", "v"), (width, width, width))
    projections = []
    for role in ("q", "k"):
        weight = ParameterSlice(module, "in_proj_weight", False, packed, role)
        if split or not module._qkv_same_embed_dim:
            weight = ParameterSlice(module, f"{role}_proj_weight")
        bias = None
        if module.in_proj_bias is not None:
            bias = ParameterSlice(module, "in_proj_bias", False, packed, role)
            bias = ParameterSlice(module, f"{role}_proj_bias") if split else bias
        path = f"{name}.{role}" if name else role
        projections.append(
            Projection(path, role, module.num_heads, module.head_dim, place, module, name, weight, bias)
        )
    return projections


def _row_layout(
    model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, fused: nn.Module
) -> RowLayout:
    weight = fused.weight
    assert isinstance(weight, Tensor)
    rows = weight.shape[1] if is_transposed(fused) else weight.shape[0]
    if "q" not in spec.roles:  # the fused matrix of a cross attention contains only keys and values
        return RowLayout(spec.roles, (rows // 2, rows // 2))
    heads = find_number(model, module, spec.num_heads, NUM_HEADS)
    if heads is None:
        raise _unknown_heads(name, module, f'fused="{spec.fused}"')
    kv_heads = find_number(model, module, spec.num_kv_heads, NUM_KV_HEADS) or heads
    if spec.layout == "per-head":
        kv_heads = heads
    head_dim = find_number(model, module, spec.head_dim, HEAD_DIM) or rows // (heads + 2 * kv_heads)
    if (heads + 2 * kv_heads) * head_dim != rows or heads % kv_heads:
        raise OelmError(
            f"{name} ({type(module).__name__}): the {rows} rows of the fused matrix do not consist of "
            f"{heads} query heads, {kv_heads} key heads and {kv_heads} value heads of size {head_dim}. "
            f"Register the class with oelm.register_attention"
        )
    groups = {"block": 1, "per-head": heads, "grouped": kv_heads}[spec.layout]
    return RowLayout(spec.roles, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), groups)


def _head_dim(model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, q_rows: int) -> int:
    heads = find_number(model, module, spec.num_heads, NUM_HEADS)
    head_dim = find_number(model, module, spec.head_dim, HEAD_DIM)
    if heads is not None and heads * (head_dim or 0) != q_rows:
        used = next((size for n in HEAD_DIM if isinstance(size := getattr(module, n, None), int)), None)
        if used is not None:
            raise OelmError(
                f"{name} ({type(module).__name__}): the query matrix has {q_rows} rows, not {heads} heads of "
                f"size {used}, so it contains more than the queries, such as a gate, which must not be "
                f"frozen. Register the class with oelm.register_attention, or leave it out with ignore=True"
            )
        # Some configs contain a head size that the module does not use, so compute it as rows / heads.
        return _divide(name, q_rows, heads)
    if head_dim is None:
        raise _unknown_heads(name, module, f"q={spec.q!r}, k={spec.k!r}")
    return head_dim


def _unknown_heads(name: str, module: nn.Module, arguments: str) -> OelmError:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return OelmError(
        f"{name or 'the model'} ({type(module).__name__}): neither the number of heads nor their size "
        f"was found. Pass one of them:\n"
        f"    import oelm\n"
        f'    oelm.register_attention("{kind}", {arguments}, num_heads="its attribute, or a number")\n'
        f"    oelm.apply(model, method)"
    )


def _divide(name: str, rows: int, by: int) -> int:
    if by < 1 or rows % by:
        raise OelmError(
            f"{name}: {rows} rows are not divisible by {by}, so they cannot be split into heads. Pass the "
            f"right num_heads or head_dim to oelm.register_attention"
        )
    return rows // by


def find_number(
    model: nn.Module, module: nn.Module, given: str | int | None, usual: tuple[str, ...]
) -> int | None:
    """Return an integer setting of an attention module, such as its number of heads; None if not found.

    `given` is the integer itself or the name of an attribute. If it is None, the names in `usual` are tried.
    The attribute is looked up in the module, then in the module's config, then in the model's config.
    """
    if isinstance(given, int):
        return given
    for source in (module, getattr(module, "config", None), getattr(model, "config", None)):
        for name in (given,) if given else usual:
            value: Any = source
            for step in name.split("."):
                value = getattr(value, step, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
