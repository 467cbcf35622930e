"""Finding every query and key projection of a model, or saying plainly why not.

The rule is all or nothing: an attention that is understood only in part is an error with the names of the
modules in question, never a silent half-freeze.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.families import (
    FUSED_WORDS,
    HEAD_DIM,
    HEADS,
    KEY_NAMES,
    KV_HEADS,
    QUERY_NAMES,
    SUSPECTS,
    VALUE_NAMES,
    AttentionSpec,
    known_spec,
)
from oelm.methods.families import register_attention as register_attention
from oelm.methods.fused import SplitMultiheadAttention, SplitProjection
from oelm.methods.layers import Place, places
from oelm.methods.layout import Layout, Window
from oelm.methods.wrappers import base_layer, unwrap


@dataclass(frozen=True)
class Projection:
    """One query or key projection of one attention, wherever its numbers are stored."""

    name: str  # stable: the same before and after a fused weight is split
    role: str  # "q" or "k"
    num_heads: int
    head_dim: int
    place: Place
    attention: nn.Module
    attention_name: str
    weight: Window
    bias: Window | None

    def heads(self) -> Tensor:
        """The weights as (num_heads, head_dim, d_in), detached."""
        return self.weight.values().reshape(self.num_heads, self.head_dim, -1)

    @property
    def fused(self) -> bool:
        """Whether it shares a parameter with something else, so that it cannot be frozen alone yet."""
        return self.weight.layout is not None or (self.bias is not None and self.bias.layout is not None)

    def __str__(self) -> str:
        return f"{self.name} ({self.role}, {self.num_heads} heads x {self.head_dim})"


def qk_projections(model: nn.Module) -> list[Projection]:
    """Every query and key projection of the model, in its own order.

    >>> from torch import nn
    >>> [str(p) for p in qk_projections(nn.MultiheadAttention(8, 2))]
    ['q (q, 2 heads x 4)', 'k (k, 2 heads x 4)']
    """
    model = unwrap(model)
    specs = {name: (module, spec) for name, module in model.named_modules() if (spec := _spec(name, module))}
    _refuse_the_half_understood(model, set(specs))
    understood = {name: (module, spec) for name, (module, spec) in specs.items() if not spec.ignore}
    if not understood:
        raise OelmError(
            f"{type(model).__name__} has no attention with query and key projections that oelm can read."
            + _candidates([(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)])
        )
    where = places(model, understood)
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


def _spec(name: str, module: nn.Module) -> AttentionSpec | None:
    if isinstance(module, nn.MultiheadAttention):
        return AttentionSpec(num_heads="num_heads")
    if isinstance(module, SplitProjection):
        return None  # its children q and k are read through the attention that holds it
    if (spec := known_spec(module)) is not None:
        return spec
    children = [child for child, m in module.named_children() if is_matrix(m)]
    queries = tuple(child for child in children if child.lower() in QUERY_NAMES)
    keys = tuple(child for child in children if child.lower() in KEY_NAMES)
    return AttentionSpec(q=queries, k=keys) if queries and keys else None


def _refuse_the_half_understood(model: nn.Module, understood: set[str]) -> None:
    """Raise for modules that look like attention, or matrices that look like Q/K, which no spec covers."""
    covered = _covered(model, understood)
    suspects = []
    for name, module in model.named_modules():
        if not is_matrix(module) or name in covered:
            continue
        own = name.rpartition(".")[2].lower()
        words = set(re.split(r"[_\d]+", own))
        around = _attention_around(model, name)
        odd = around is not None and (not _related(around, understood) or bool(words & SUSPECTS))
        if odd or words & FUSED_WORDS or own in QUERY_NAMES or own in KEY_NAMES:
            suspects.append((name, module))
    if suspects:
        raise OelmError(
            f"{type(model).__name__}: some attention modules are not understood, so nothing was changed."
            + _candidates(suspects)
        )


def _covered(model: nn.Module, understood: set[str]) -> set[str]:
    names = set()
    for name in understood:
        module = model.get_submodule(name)
        spec = _spec(name, module)
        assert spec is not None
        prefix = f"{name}." if name else ""
        if spec.ignore or isinstance(module, nn.MultiheadAttention):
            names |= {prefix + n for n, _ in module.named_modules()}
        if spec.fused:
            names |= {prefix + spec.fused + s for s in ("", ".q", ".k", ".v")}
        names |= {prefix + child for child in (*spec.q, *spec.k)}
    return names


def _attention_around(model: nn.Module, name: str) -> str | None:
    """The name of the innermost module around `name` whose class is called an attention."""
    steps = name.split(".")
    for depth in range(len(steps) - 1, -1, -1):
        around = ".".join(steps[:depth])
        if re.search("attention|attn", type(model.get_submodule(around)).__name__, re.IGNORECASE):
            return around
    return None


def _related(name: str, understood: set[str]) -> bool:
    """Whether an understood attention is this module, holds it, or stands inside it."""
    inside = f"{name}." if name else ""
    return any(u == name or u.startswith(inside) or name.startswith(f"{u}.") for u in understood)


def _candidates(modules: list[tuple[str, nn.Module]]) -> str:
    """The part of an error that names candidates and shows the lines that would make them understood."""
    if not modules:
        return " It has no linear layers at all."
    shown = "\n".join(f"    {name}: {type(module).__name__}" for name, module in modules[:8])
    more = f"\n    ... and {len(modules) - 8} more" if len(modules) > 8 else ""
    return (
        f"\nCandidates:\n{shown}{more}\n"
        f"Say where its Q and K are, with the attribute names of your attention class:\n"
        f"    import oelm\n"
        f'    oelm.register_attention("YourAttention", q="q_name", k="k_name", num_heads="heads_name")\n'
        f"    oelm.apply(model, method)\n"
        f'(one fused matrix: fused="name", layout="block" or "per-head"; not attention at all: ignore=True)'
    )


def _read(
    model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, place: Place
) -> list[Projection]:
    if isinstance(module, nn.MultiheadAttention):
        return _read_multihead(name, module, place)
    separate = [("q", child) for child in spec.q] + [("k", child) for child in spec.k]
    found: list[tuple[str, str, Window, Window | None]] = [
        (role, child, *_whole(_child(name, module, child))) for role, child in separate
    ]
    if spec.fused:
        fused = _child(name, module, spec.fused)
        if isinstance(fused, SplitProjection):
            wanted = [role for role in fused.layout.roles if role in ("q", "k")]
            found += [
                (role, f"{spec.fused}.{role}", *_whole(base_layer(getattr(fused, role)))) for role in wanted
            ]
        else:
            layout = _layout(model, name, module, spec, fused)
            transposed = is_transposed(fused)
            for role in (r for r in layout.roles if r in ("q", "k")):
                bias = None if fused.bias is None else Window(fused, "bias", False, layout, role)
                weight = Window(fused, "weight", transposed, layout, role)
                found.append((role, f"{spec.fused}.{role}", weight, bias))
    sizes = {role: weight.rows for role, _, weight, _ in found}
    head_dim = _head_dim(model, name, module, spec, sizes["q"])
    return [
        Projection(
            name=f"{name}.{child}" if name else child,
            role=role,
            num_heads=_divide(f"{name}.{child}", weight.rows, head_dim),
            head_dim=head_dim,
            place=place,
            attention=module,
            attention_name=name,
            weight=weight,
            bias=bias,
        )
        for role, child, weight, bias in found
    ]


def _child(name: str, module: nn.Module, path: str) -> nn.Module:
    try:
        return base_layer(module.get_submodule(path))
    except AttributeError:
        raise OelmError(
            f"{name} ({type(module).__name__}) has no '{path}': what register_attention says does not fit it"
        ) from None


def _whole(module: nn.Module) -> tuple[Window, Window | None]:
    bias = getattr(module, "bias", None)
    return Window(module, "weight", is_transposed(module)), None if bias is None else Window(module, "bias")


def _read_multihead(name: str, module: nn.MultiheadAttention, place: Place) -> list[Projection]:
    width, split = module.embed_dim, isinstance(module, SplitMultiheadAttention)
    packed = Layout(("q", "k", "v"), (width, width, width))
    projections = []
    for role in ("q", "k"):
        separate = split or not module._qkv_same_embed_dim
        weight = (
            Window(module, f"{role}_proj_weight")
            if separate
            else Window(module, "in_proj_weight", False, packed, role)
        )
        bias = None
        if module.in_proj_bias is not None:
            bias = (
                Window(module, f"{role}_proj_bias")
                if split
                else Window(module, "in_proj_bias", False, packed, role)
            )
        path = f"{name}.{role}" if name else role
        projections.append(
            Projection(path, role, module.num_heads, module.head_dim, place, module, name, weight, bias)
        )
    return projections


def _layout(model: nn.Module, name: str, module: nn.Module, spec: AttentionSpec, fused: nn.Module) -> Layout:
    weight = fused.weight
    assert isinstance(weight, Tensor)
    rows = weight.shape[1] if is_transposed(fused) else weight.shape[0]
    if "q" not in spec.roles:  # keys and values of a cross attention
        return Layout(spec.roles, (rows // 2, rows // 2))
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
    return Layout(spec.roles, (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), groups)


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
    kind = type(module).__name__
    return OelmError(
        f"{name or 'the model'} ({kind}): neither the number of heads nor their size was found. Say it:\n"
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
