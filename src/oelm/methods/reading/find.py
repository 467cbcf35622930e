"""Finding every query and key projection of a model, or an error that says why not.

The rule is all or nothing: an attention that is recognised only in part is an error with the names of the
modules in question, never a silent half-freeze. How the rows of an unknown fused matrix are ordered is found
by trying the usual layouts against the numeric check of verify.py.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.extras.split import SplitMultiheadAttention, SplitProjection
from oelm.methods.reading.families import (
    FUSED_NAMES,
    FUSED_WORDS,
    HEAD_DIM,
    HEADS,
    KEY_NAMES,
    KV_HEADS,
    POSITION_KEYS,
    QUERY_NAMES,
    SUSPECTS,
    VALUE_NAMES,
    AttentionSpec,
    LayoutName,
    known_spec,
    multi_latent,
)
from oelm.methods.reading.families import register_attention as register_attention
from oelm.methods.reading.projection import ParameterSlice, Place, Projection, RowLayout, layer_places
from oelm.methods.reading.verify import verify
from oelm.methods.reading.wrappers import base_layer, unwrap


def qk_projections(model: nn.Module) -> list[Projection]:
    """Every query and key projection of the model, in its own order.

    >>> from torch import nn
    >>> [str(p) for p in qk_projections(nn.MultiheadAttention(8, 2))]
    ['q (q, 2 heads x 4)', 'k (k, 2 heads x 4)']
    """
    model = unwrap(model)
    specs = {
        name: (module, spec) for name, module in model.named_modules() if (spec := _spec(model, name, module))
    }
    check_all_attention_recognized(model, {name: spec for name, (_, spec) in specs.items()})
    understood = {name: (module, spec) for name, (module, spec) in specs.items() if not spec.ignore}
    if not understood:
        raise OelmError(
            f"{type(model).__name__} has no attention with query and key projections that oelm can read."
            + _candidates(model, [(n, m) for n, m in model.named_modules() if is_matrix(m)])
        )
    where = layer_places(model, understood)
    return [
        projection
        for name, (module, spec) in understood.items()
        for projection in _read(model, name, module, spec, where[name])
    ]


def value_projections(attention: nn.Module) -> list[str]:
    """The names, within an attention, of matrices that are called values; one, unless it is fused or odd."""
    return [
        name
        for name, module in attention.named_modules()
        if is_matrix(module) and name.rpartition(".")[2].lower() in VALUE_NAMES
    ]


def is_matrix(module: object) -> bool:
    """A Linear, transformers' Conv1D, or one of our own projections in its place, also inside an adapter."""
    if isinstance(module, nn.Module):
        module = base_layer(module)
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "ExtendedProjection")


def is_transposed(module: object) -> bool:
    """Whether the weight is stored as (in, out): transformers' Conv1D, and what stands in its place."""
    return type(module).__name__ == "Conv1D" or bool(getattr(module, "transposed", False))


def is_projection(module: object) -> bool:
    """Whether it can be a query or key projection: a matrix, or a convolution over tokens or pixels."""
    inner = base_layer(module) if isinstance(module, nn.Module) else module
    return is_matrix(inner) or isinstance(inner, nn.Conv1d | nn.Conv2d)


def _spec(model: nn.Module, name: str, module: nn.Module) -> AttentionSpec | None:
    """Where this module keeps Q and K; None if it is not an attention as far as can be told."""
    if isinstance(module, nn.MultiheadAttention):
        return AttentionSpec(num_heads="num_heads")
    if isinstance(module, SplitProjection):
        return None  # its children q and k are read through the attention that holds it
    if (spec := known_spec(module) or multi_latent(module)) is not None:
        return spec
    found = _projection_names(module)
    if {"sampling_offsets", "attention_weights"} <= set(found):
        return AttentionSpec(ignore=True)  # deformable attention: its weights come from the query alone
    bare = {n for n in module._parameters if n in found}  # "..._query" is a learned token there
    queries = [
        p for p, own in found.items() if own in QUERY_NAMES or (own.endswith("_query") and p not in bare)
    ]
    keys = [p for p, own in found.items() if own in KEY_NAMES or (own.endswith("_key") and p not in bare)]
    fused = [path for path, own in found.items() if own in FUSED_NAMES or _words(own) & FUSED_WORDS]
    if queries and keys and not fused:
        positions = [p for p in POSITION_KEYS if p not in keys and _is_at(module, p)]
        sizes = frozenset(p for p in (*queries, *keys) if p.endswith(("_query", "_key")) and p not in _USUAL)
        # Pixels that attend to each other through 1x1 convolutions have one head, and no word for it.
        pixels = isinstance(getattr(module, queries[0], None), nn.Conv2d)
        alone = pixels and not any(hasattr(module, n) for n in HEADS)
        return AttentionSpec(
            q=tuple(queries), k=(*keys, *positions), per_head=sizes, num_heads=1 if alone else None
        )
    if len(fused) == 1 and not keys:
        return _detect_layout(model, name, module, tuple(queries), fused[0])
    return None


_USUAL = QUERY_NAMES | KEY_NAMES


def _words(name: str) -> set[str]:
    return set(re.split(r"[_\d]+", name))


def _projection_names(module: nn.Module) -> dict[str, str]:
    """Paths of the module's own projections, by path their names in lower case.

    A wrapper (`q_proj.linear`) goes by the name of the wrapper; a bare parameter of three dimensions
    (d_in, heads, head size) counts as a projection.
    """
    found = {}
    for child, inner in module.named_children():
        if is_projection(inner) or isinstance(inner, SplitProjection):
            found[child] = child.lower()
        elif is_projection(getattr(inner, "linear", None)) and len(list(inner.children())) == 1:
            found[f"{child}.linear"] = child.lower()
    found |= {n: n.lower() for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    return found


def _is_at(module: nn.Module, path: str) -> bool:
    inner: Any = module
    for step in path.split("."):
        inner = getattr(inner, step, None)
    return is_projection(inner) or (isinstance(inner, nn.Parameter) and inner.dim() == 3)


_detected: dict[Any, AttentionSpec | None] = {}


def _detect_layout(
    model: nn.Module, name: str, module: nn.Module, queries: tuple[str, ...], fused: str
) -> AttentionSpec | None:
    """The one layout of a fused matrix that the numeric check proves; None if none does."""
    roles = ("k", "v") if queries else ("q", "k", "v")
    if isinstance(module.get_submodule(fused), SplitProjection):
        return AttentionSpec(q=queries, fused=fused, roles=roles)
    heads = _number(model, module, None, HEADS)
    key = (type(module), queries, fused, heads, *((n, p.shape) for n, p in module.named_parameters()))
    if key not in _detected:
        _detected[key] = None
        layouts: tuple[LayoutName, ...] = ("block", "per-head", "grouped")
        for layout in layouts:
            spec = AttentionSpec(q=queries, fused=fused, layout=layout, roles=roles)
            try:
                projections = _read(model, name, module, spec, Place("", 0, 1, ""))
            except OelmError:
                continue
            if verify(model, projections).verified:
                _detected[key] = spec
                break
    return _detected[key]


def check_all_attention_recognized(model: nn.Module, specs: dict[str, AttentionSpec]) -> None:
    """Raise for modules that look like attention, or matrices that look like Q/K, which no spec covers."""
    covered = _covered(model, specs)
    suspects = []
    for name, module in model.named_modules():
        if not is_projection(module) or name in covered or isinstance(module, SplitProjection):
            continue
        own = name.rpartition(".")[2].lower()
        around = _attention_around(model, name)
        odd = around is not None and (not _related(around, set(specs)) or bool(_words(own) & SUSPECTS))
        if odd and isinstance(module, nn.Conv1d | nn.Conv2d):
            odd = bool(_words(own) & SUSPECTS)  # convolutions inside an attention rarely project
        if odd or _words(own) & FUSED_WORDS or own in QUERY_NAMES or own in KEY_NAMES:
            suspects.append((name, module))
    if suspects:
        raise OelmError(
            f"{type(model).__name__}: some attention modules are not recognised, so nothing was changed."
            + _candidates(model, suspects)
        )


def _covered(model: nn.Module, specs: dict[str, AttentionSpec]) -> set[str]:
    names = set()
    for name, spec in specs.items():
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        if spec.ignore or isinstance(module, nn.MultiheadAttention):
            names |= {prefix + n for n, _ in module.named_modules()}
        for fused in (spec.fused, *(part.name for part in spec.parts)):
            names |= {prefix + fused + s for s in ("", ".q", ".k", ".v", ".latent")} if fused else set()
        names |= {prefix + child for child in (*spec.q, *spec.k)}
    return names


def _attention_around(model: nn.Module, name: str) -> str | None:
    """The name of the innermost module around `name` whose class is called an attention."""
    steps = name.split(".")
    for depth in range(len(steps) - 1, -1, -1):
        around = ".".join(steps[:depth])
        if re.search("attention|attn|mhsa|mhca", type(model.get_submodule(around)).__name__, re.IGNORECASE):
            return around
    return None


def _related(name: str, understood: set[str]) -> bool:
    """Whether an understood attention is this module, holds it, or stands inside it."""
    inside = f"{name}." if name else ""
    return any(u == name or u.startswith(inside) or name.startswith(f"{u}.") for u in understood)


def _candidates(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> str:
    """The part of an error that names candidates and shows the lines that would make them recognised."""
    if not modules:
        return " It has no linear layers at all."
    shown = "\n".join(f"    {name}: {type(module).__name__}" for name, module in modules[:8])
    more = f"\n    ... and {len(modules) - 8} more" if len(modules) > 8 else ""
    lines = [f"\nCandidates:\n{shown}{more}", _how_to_register(model, [name for name, _ in modules])]
    return "\n".join(lines)


def _how_to_register(model: nn.Module, names: list[str]) -> str:
    """The lines to type, with the real class and its real attribute names."""
    around, _, own = names[0].rpartition(".")
    holder = model.get_submodule(around)
    mine = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == around]
    query = next((n for n in mine if _words(n.lower()) & _QUERY_WORDS), "...")
    key = next((n for n in mine if _words(n.lower()) & _KEY_WORDS), "...")
    fused = next((n for n in mine if _words(n.lower()) & FUSED_WORDS), own)
    heads = next((n for n in HEADS if isinstance(getattr(holder, n, None), int)), "...")
    kind = f"{type(holder).__module__}.{type(holder).__qualname__}"
    return (
        f"Say where {type(holder).__name__} keeps its Q and K, in one of these ways:\n"
        f"    import oelm\n"
        f'    oelm.register_attention("{kind}", q="{query}", k="{key}", num_heads="{heads}")\n'
        f'    oelm.register_attention("{kind}", fused="{fused}", layout="block", num_heads="{heads}")'
        f'  # or "per-head", "grouped"\n'
        f'    oelm.register_attention("{kind}", ignore=True)  # it has no Q and K\n'
        f"    oelm.apply(model, method)"
    )


_QUERY_WORDS = {"q", "query", "queries", "wq"}
_KEY_WORDS = {"k", "key", "keys", "wk"}


def _read(
    model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, place: Place
) -> list[Projection]:
    if isinstance(module, nn.MultiheadAttention):
        return _read_multihead(name, module, place)
    # (role, path, weight, bias, head size where it is not the common one)
    found: list[tuple[str, str, ParameterSlice, ParameterSlice | None, int | None]] = []
    for role, path in [("q", path) for path in spec.q] + [("k", path) for path in spec.k]:
        weight, bias = _whole(name, module, path)
        found.append((role, path, weight, bias, weight.rows if path in spec.single else None))
    parts = [(part.name, part.layout, part.head_dims) for part in spec.parts]
    if spec.fused:
        fused = _child(name, module, spec.fused)
        layout = (
            fused.layout if isinstance(fused, SplitProjection) else _layout(model, name, module, spec, fused)
        )
        parts.append((spec.fused, layout, {}))
    for path, layout, head_dims in parts:
        fused = _child(name, module, path)
        for role in (r for r in layout.roles if r in ("q", "k")):
            if isinstance(fused, SplitProjection):
                weight, bias = _whole(name, module, f"{path}.{role}")
            else:
                weight = ParameterSlice(fused, "weight", is_transposed(fused), layout, role)
                bias = None if fused.bias is None else ParameterSlice(fused, "bias", False, layout, role)
            if role == "q" and spec.q_bias:
                bias = ParameterSlice(module, spec.q_bias)
            found.append((role, f"{path}.{role}", weight, bias, head_dims.get(role)))
    rows = next((w.rows for role, _, w, _, size in found if role == "q" and size is None), 0)
    common = _head_dim(model, name, module, spec, rows) if rows else 0
    heads = rows // common if rows else 0
    projections = []
    for role, path, weight, bias, size in found:
        full = f"{name}.{path}" if name else path
        if path in spec.per_head:
            size = _divide(full, weight.rows, heads)
        head_dim = size or common
        projections.append(
            Projection(
                full, role, _divide(full, weight.rows, head_dim), head_dim, place, module, name, weight, bias
            )
        )
    return projections


def _child(name: str, module: nn.Module, path: str) -> Any:
    """The module or three-dimensional parameter at a path that a spec names."""
    found: Any = module
    for step in path.split("."):
        found = getattr(found, step, None)
    if not isinstance(found, nn.Module | nn.Parameter):
        raise OelmError(
            f"{name or 'the model'} ({type(module).__name__}) has no '{path}': what register_attention says "
            f"does not fit it"
        )
    return base_layer(found) if isinstance(found, nn.Module) else found


def _whole(name: str, module: nn.Module, path: str) -> tuple[ParameterSlice, ParameterSlice | None]:
    child = _child(name, module, path)
    if isinstance(child, nn.Parameter):
        owner, _, attribute = path.rpartition(".")
        return ParameterSlice(module.get_submodule(owner), attribute, transposed=True), None
    bias = getattr(child, "bias", None)
    return ParameterSlice(child, "weight", is_transposed(child)), None if bias is None else ParameterSlice(
        child, "bias"
    )


def _read_multihead(name: str, module: nn.MultiheadAttention, place: Place) -> list[Projection]:
    width, split = module.embed_dim, isinstance(module, SplitMultiheadAttention)
    packed = RowLayout(("q", "k", "v"), (width, width, width))
    projections = []
    for role in ("q", "k"):
        separate = split or not module._qkv_same_embed_dim
        weight = (
            ParameterSlice(module, f"{role}_proj_weight")
            if separate
            else ParameterSlice(module, "in_proj_weight", False, packed, role)
        )
        bias = None
        if module.in_proj_bias is not None:
            bias = (
                ParameterSlice(module, f"{role}_proj_bias")
                if split
                else ParameterSlice(module, "in_proj_bias", False, packed, role)
            )
        path = f"{name}.{role}" if name else role
        projections.append(
            Projection(path, role, module.num_heads, module.head_dim, place, module, name, weight, bias)
        )
    return projections


def _layout(
    model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, fused: nn.Module
) -> RowLayout:
    weight = fused.weight
    assert isinstance(weight, Tensor)
    rows = weight.shape[1] if is_transposed(fused) else weight.shape[0]
    if "q" not in spec.roles:  # keys and values of a cross attention
        return RowLayout(spec.roles, (rows // 2, rows // 2))
    heads = _number(model, module, spec.num_heads, HEADS)
    if heads is None:
        raise _heads_unknown(name, module, f'fused="{spec.fused}"')
    kv_heads = _number(model, module, spec.num_kv_heads, KV_HEADS) or heads
    if spec.layout == "per-head":
        kv_heads = heads
    head_dim = _number(model, module, spec.head_dim, HEAD_DIM) or rows // (heads + 2 * kv_heads)
    if (heads + 2 * kv_heads) * head_dim != rows or heads % kv_heads:
        raise OelmError(
            f"{name} ({type(module).__name__}): {rows} fused rows do not divide into "
            f"{heads} query and {kv_heads} key heads of {head_dim}"
        )
    groups = {"block": 1, "per-head": heads, "grouped": kv_heads}[spec.layout]
    return RowLayout(spec.roles, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), groups)


def _head_dim(model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, q_rows: int) -> int:
    heads = _number(model, module, spec.num_heads, HEADS)
    head_dim = _number(model, module, spec.head_dim, HEAD_DIM)
    if heads is not None and heads * (head_dim or 0) != q_rows:
        used = next((size for n in HEAD_DIM if isinstance(size := getattr(module, n, None), int)), None)
        if used is not None:
            raise OelmError(
                f"{name} ({type(module).__name__}): {q_rows} query rows are not {heads} heads of {used}, so "
                f"they hold something beside the queries, such as a gate, which must not be frozen with them"
            )
        # Some configs name a head size that the module does not use; the number of heads decides.
        return _divide(name, q_rows, heads)
    if head_dim is None:
        raise _heads_unknown(name, module, f"q={spec.q!r}, k={spec.k!r}")
    return head_dim


def _heads_unknown(name: str, module: nn.Module, where: str) -> OelmError:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return OelmError(
        f"{name or 'the model'} ({type(module).__name__}): neither the number of heads nor their size "
        f"was found. Say it:\n"
        f"    import oelm\n"
        f'    oelm.register_attention("{kind}", {where}, num_heads="its attribute, or a number")\n'
        f"    oelm.apply(model, method)"
    )


def _divide(name: str, rows: int, by: int) -> int:
    if by < 1 or rows % by:
        raise OelmError(f"{name}: {rows} rows do not divide by {by}, so its heads cannot be told apart")
    return rows // by


def _number(
    model: nn.Module, module: nn.Module, given: str | int | None, usual: tuple[str, ...]
) -> int | None:
    """A number named by the spec, else by its usual names on the module, its config, or the model's."""
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
