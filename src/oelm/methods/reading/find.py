"""Find all query and key projections of a model.

If a part of an attention module is not recognised, an error names it; otherwise nobody would notice that only
some of the queries and keys are frozen. The row order of an unknown fused matrix is found by trying the usual
layouts until the numeric check of `verify.py` accepts one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.split import SplitProjection
from oelm.methods.reading.advice import attention_around, list_candidates, may_be_qk
from oelm.methods.reading.build import build_projections, find_number
from oelm.methods.reading.families import (
    FUSED_NAMES,
    FUSED_WORDS,
    KEY_NAMES,
    NUM_HEADS,
    POSITION_KEYS,
    QK_WORDS,
    QUERY_NAMES,
    VALUE_NAMES,
    AttentionSpec,
    LayoutName,
    attached_spec,
    is_registered,
    known_spec,
    multi_latent,
    words,
)
from oelm.methods.reading.projection import (
    Place,
    Projection,
    is_matrix,
    is_projection,
    layer_places,
    names_by_module,
)
from oelm.methods.reading.select import ALL, Patterns, Selection
from oelm.methods.reading.verify import discover_specs, kind_of_module, verify_attention
from oelm.methods.reading.wrappers import unwrap

#: Cache for `_detect_layout()`: class, names and shapes of an attention module -> the spec that was found.
_detected: dict[Any, AttentionSpec | None] = {}


def qk_projections(model: nn.Module, *, where: Patterns = None, exclude: Patterns = None) -> list[Projection]:
    """Return all query and key projections of the model, in the order of `model.named_modules()`.

    Args:
        where: Return only projections that match one of these name patterns, as in `oelm.apply()`.
        exclude: Leave out projections that match one of these name patterns.

    Examples:
        >>> from torch import nn
        >>> [str(p) for p in qk_projections(nn.MultiheadAttention(8, 2))]
        ['q (q, 2 heads x 4)', 'k (k, 2 heads x 4)']
    """
    return find_projections(model, Selection.of(where, exclude))


def find_projections(
    model: nn.Module, selection: Selection = ALL, example_inputs: Any = None
) -> list[Projection]:
    """Return the selected query and key projections.

    Raise OelmError if a selected attention module is not recognised; the others need not be recognised.

    example_inputs: A batch for the model. A forward pass shows how the model calls unknown attention modules.
    """
    model = unwrap(model)
    specs = {
        name: spec for name, module in model.named_modules() if (spec := _find_spec(model, name, module))
    }
    if unrecognised := _unrecognised(model, specs, selection):
        specs |= discover_specs(model, _holders(model, unrecognised, specs), example_inputs)
        check_all_attention_recognized(model, specs, selection)
    ignored = [n for n, spec in specs.items() if spec.ignore and is_registered(model.get_submodule(n))]
    specs = {
        name: spec
        for name, spec in specs.items()
        if not spec.ignore and not any(contains(outer, name) for outer in ignored)
    }
    if not specs:
        raise _nothing_found(model)
    places = layer_places(model, specs)
    found = []
    for name, spec in specs.items():
        try:
            found += build_projections(model, name, spec, places[name])
        except OelmError:
            known = is_registered(model.get_submodule(name))
            if not known and (discovered := discover_specs(model, [name], example_inputs)):
                found += build_projections(model, name, discovered[name], places[name])
            elif selection.reaches(name, model.get_submodule(name)):
                raise
    selection.check_patterns(model, [p.name for p in found])
    if not selection.is_everything:
        _check_all_names_selected(model, found, selection)
    selected = [p for p in found if selection.includes(p.name)]
    if not selected and not selection.is_everything:
        raise UsageError(
            f"where={list(selection.where)} and exclude={list(selection.exclude)} select no query or key "
            f"projection of {type(model).__name__}. Its projections are: "
            f"{', '.join(p.name for p in found[:4])}, ..."
        )
    return selected


def _check_all_names_selected(model: nn.Module, found: list[Projection], selection: Selection) -> None:
    """Raise UsageError if the selection includes only some names of an attention module that has several."""
    modules = names_by_module(model)
    for p in found:
        names = [name + p.name.removeprefix(p.attention_name) for name in modules[id(p.attention)]]
        selected = {name: selection.includes(name) for name in names}
        if len(set(selected.values())) > 1:
            raise UsageError(
                f"{' and '.join(names)} are one module, but where= and exclude= select only "
                f"{' and '.join(name for name in names if selected[name])}. Select all of these names or "
                f"none, or give each place its own module (copy.deepcopy)"
            )


def _nothing_found(model: nn.Module) -> OelmError:
    kind = type(model).__name__
    if linear := linear_attentions(model):
        return OelmError(
            f"{kind} has only linear attention ({linear[0]}, ...), which computes no attention scores, so it "
            f"has no queries and keys that could be frozen"
        )
    matrices = [
        (name, module)
        for name, module in model.named_modules()
        if is_matrix(module) or (hasattr(module, "weight") and may_be_qk(name))
    ]
    return OelmError(f"oelm found no query and key projections in {kind}." + list_candidates(model, matrices))


def linear_attentions(model: nn.Module, selection: Selection = ALL) -> list[str]:
    """Return the names of the selected modules that were discovered to be linear attention (no softmax)."""
    specs = {name: attached_spec(module) for name, module in unwrap(model).named_modules()}
    return [n for n, spec in specs.items() if spec is not None and spec.ignore and selection.includes(n)]


def contains(outer: str, inner: str) -> bool:
    """Return whether the module `inner` is the module `outer` or inside it."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def value_projections(attention: nn.Module) -> list[str]:
    """Return the paths of the value projections in an attention module, recognised by their usual names.

    There is usually one; a module with a fused Q/K/V has none.
    """
    return [
        name
        for name, module in attention.named_modules()
        if is_matrix(module) and name.rpartition(".")[2].lower() in VALUE_NAMES
    ]


def _find_spec(model: nn.Module, name: str, module: nn.Module) -> AttentionSpec | None:
    """Return where a module stores Q and K; None if the module is not recognised as attention."""
    if isinstance(module, nn.MultiheadAttention):
        known = known_spec(module)
        return known if known is not None and known.ignore else AttentionSpec(num_heads="num_heads")
    if isinstance(module, SplitProjection):
        return None  # the spec of the attention module around it covers its q and k
    if (spec := known_spec(module)) is not None:
        return spec
    if not module._modules and all(p is None or p.dim() != 3 for p in module._parameters.values()):
        return None  # most modules of a model are leaves like this, without any projection inside
    if (spec := multi_latent(module)) is not None:
        return spec
    found = _projection_names(module)
    if {"sampling_offsets", "attention_weights"} <= set(found):
        return AttentionSpec(ignore=True)  # deformable attention has no keys
    parameters = {n for n in module._parameters if n in found}  # a parameter "..._query" is a learned token
    queries = [
        p
        for p, own in found.items()
        if own in QUERY_NAMES or (own.endswith("_query") and p not in parameters)
    ]
    keys = [
        p for p, own in found.items() if own in KEY_NAMES or (own.endswith("_key") and p not in parameters)
    ]
    fused = [path for path, own in found.items() if own in FUSED_NAMES or words(own) & FUSED_WORDS]
    if queries and keys and not fused:
        return _separate_spec(module, queries, keys)
    if len(fused) == 1 and not keys:
        return _detect_layout(model, name, module, tuple(queries), fused[0])
    return None


def _separate_spec(module: nn.Module, queries: list[str], keys: list[str]) -> AttentionSpec:
    positions = [p for p in POSITION_KEYS if p not in keys and _has_projection(module, p)]
    own_size = frozenset(
        p for p in (*queries, *keys) if p.endswith(("_query", "_key")) and p not in QUERY_NAMES | KEY_NAMES
    )
    # Attention between pixels projects with 1x1 convolutions. It has one head, but often no attribute for it.
    pixels = isinstance(getattr(module, queries[0], None), nn.Conv2d)
    one_head = pixels and not any(hasattr(module, n) for n in NUM_HEADS)
    return AttentionSpec(
        q=tuple(queries), k=(*keys, *positions), per_head=own_size, num_heads=1 if one_head else None
    )


def _projection_names(module: nn.Module) -> dict[str, str]:
    """Return {path: name in lower case} for the projections that are direct children of a module.

    A projection inside a wrapper (`q_proj.linear`) gets the name of the wrapper. A parameter with three
    dimensions (d_in, heads, head_dim) also counts as a projection.
    """
    found = {}
    for child, inner in module.named_children():
        if is_projection(inner) or isinstance(inner, SplitProjection):
            found[child] = child.lower()
        elif is_projection(getattr(inner, "linear", None)) and len(list(inner.children())) == 1:
            found[f"{child}.linear"] = child.lower()
    found |= {n: n.lower() for n, p in module._parameters.items() if p is not None and p.dim() == 3}
    return found


def _has_projection(module: nn.Module, path: str) -> bool:
    inner: Any = module
    for step in path.split("."):
        inner = getattr(inner, step, None)
    return is_projection(inner) or (isinstance(inner, nn.Parameter) and inner.dim() == 3)


def _detect_layout(
    model: nn.Module, name: str, module: nn.Module, queries: tuple[str, ...], fused: str
) -> AttentionSpec | None:
    """Return a spec with the row layout of the matrix `fused`, found by trying the usual layouts.

    It is the first layout that the numeric check accepts. Return None if it accepts none of them.
    """
    roles = ("k", "v") if queries else ("q", "k", "v")
    if isinstance(module.get_submodule(fused), SplitProjection):
        return AttentionSpec(q=queries, fused=fused, roles=roles)
    heads = find_number(model, module, None, NUM_HEADS)
    key = (kind_of_module(module), queries, fused, heads)
    if key not in _detected:
        _detected[key] = None
        layouts: tuple[LayoutName, ...] = ("block", "per-head", "grouped")
        for layout in layouts:
            spec = AttentionSpec(q=queries, fused=fused, layout=layout, roles=roles)
            try:
                projections = build_projections(model, name, spec, Place("", 0, 1, ""))
            except OelmError:
                continue
            if verify_attention(model, projections).verified:
                _detected[key] = spec
                break
    return _detected[key]


def _unrecognised(
    model: nn.Module, specs: dict[str, AttentionSpec], selection: Selection
) -> list[tuple[str, nn.Module | nn.Parameter]]:
    """Return (name, module or parameter) of what is selected and looks like Q or K, but is in no spec."""
    covered = _covered_modules(model, specs)
    unrecognised: list[tuple[str, nn.Module | nn.Parameter]] = []
    for name, module in model.named_modules():
        if not is_projection(module) or name in covered or isinstance(module, SplitProjection):
            continue
        if not selection.includes(name):
            continue
        own = name.rpartition(".")[2].lower()
        attention = attention_around(model, name)
        suspect = attention is not None and (
            not _overlaps(attention, set(specs)) or bool(words(own) & QK_WORDS)
        )
        if suspect and isinstance(module, nn.Conv1d | nn.Conv2d):
            suspect = bool(words(own) & QK_WORDS)  # other convolutions are rarely projections
        if suspect or words(own) & FUSED_WORDS or own in QUERY_NAMES or own in KEY_NAMES:
            unrecognised.append((name, module))
    return unrecognised + _bare_matrices(model, specs, selection)


def _bare_matrices(
    model: nn.Module, specs: dict[str, AttentionSpec], selection: Selection
) -> list[tuple[str, nn.Module | nn.Parameter]]:
    """Return (name, parameter) of 2-D parameters named like Q and K whose module is in no spec.

    A module must have both: a single parameter with the name "query" is usually a learned token.
    """
    found: list[tuple[str, nn.Module | nn.Parameter]] = []
    for owner, module in model.named_modules():
        matrices = {n.lower(): n for n, p in module._parameters.items() if p is not None and p.dim() == 2}
        queries, keys = (sorted(matrices.keys() & names) for names in (QUERY_NAMES, KEY_NAMES))
        if queries and keys and not _overlaps(owner, set(specs)):
            own = [matrices[name] for name in (*queries, *keys)]
            found += [(f"{owner}.{name}" if owner else name, module.get_parameter(name)) for name in own]
    return [(name, parameter) for name, parameter in found if selection.includes(name)]


def _holders(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module | nn.Parameter]], specs: dict[str, AttentionSpec]
) -> list[str]:
    """Return the names of modules that contain the given ones and may be attention, the innermost first."""
    found: dict[str, None] = {}
    for name, _ in modules:
        parent = name.rpartition(".")[0]
        for holder in (parent, attention_around(model, name)):
            inside = {n for n in specs if not isinstance(model.get_submodule(n), nn.MultiheadAttention)}
            if holder is None or is_registered(model.get_submodule(holder)):
                continue
            if holder in inside or not _overlaps(holder, inside):
                found[holder] = None
    return list(found)


def check_all_attention_recognized(
    model: nn.Module, specs: dict[str, AttentionSpec], selection: Selection
) -> None:
    """Raise OelmError with the names of selected modules that look like Q or K but are in no spec."""
    if unrecognised := _unrecognised(model, specs, selection):
        raise OelmError(
            f"{type(model).__name__}: oelm does not recognise some attention modules, so nothing was changed."
            + list_candidates(model, unrecognised)
            + "\nTo leave them out: oelm.apply(model, method, exclude=...), or where=... for the others"
        )


def _covered_modules(model: nn.Module, specs: dict[str, AttentionSpec]) -> set[str]:
    """Return the names of all modules that the specs mention."""
    names = set()
    for name, spec in specs.items():
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        is_discovered = attached_spec(module) is spec  # discovery has tested all projections inside
        if spec.ignore or is_discovered or isinstance(module, nn.MultiheadAttention):
            names |= {prefix + n for n, _ in module.named_modules()}
        for fused in (spec.fused, *(part.name for part in spec.parts)):
            names |= {prefix + fused + s for s in ("", ".q", ".k", ".v", ".latent")} if fused else set()
        names |= {prefix + child for child in (*spec.q, *spec.k)}
    return names


def _overlaps(name: str, others: set[str]) -> bool:
    """Return whether the module `name` is one of `others`, contains one of them, or is inside one."""
    inside = f"{name}." if name else ""
    return any(other == name or other.startswith(inside) or name.startswith(f"{other}.") for other in others)
