"""What is refused, or warned of, before a method changes anything in a model."""

from __future__ import annotations

import warnings

from torch import nn

from oelm.errors import OelmError, UsageError
from oelm.methods.install import start_of
from oelm.methods.method import Method
from oelm.methods.presets import PRETRAINED_DEFAULT
from oelm.methods.reading.find import is_matrix, value_projections
from oelm.methods.reading.projection import FeedForward, Projection
from oelm.methods.reading.wrappers import base_layer, is_adapter
from oelm.methods.record import freeze_and_thaw_times

QUERY_NORMS = ("q_norm", "q_layernorm", "q_layer_norm", "q_ln", "query_layernorm", "query_norm", "q_b_norm")


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a whole number, 0 or more, got {seed!r} ({type(seed).__name__})")


def check_depth(chosen: Method, projections: list[Projection]) -> None:
    depth = max(p.place.depth for p in projections)
    if chosen.freeze == "all-but-last" and chosen.layers >= depth:
        raise UsageError(
            f"method '{chosen.name}' leaves the last {chosen.layers} layers trained, but this model has only "
            f"{depth}: it would freeze nothing. Use fewer layers, e.g. dataclasses.replace(method, layers=1)"
        )


def check_weights(chosen: Method, projections: list[Projection], matrices: list[FeedForward]) -> None:
    """Tensors that cannot be set or frozen, and weights from which no start follows, before any is changed:
    an error at the last layer must not leave the first ones rewritten."""
    if chosen.touches_nothing:
        return
    targets: list[Projection | FeedForward] = [p for p in projections if p.role in chosen.parts]
    for target in [*targets, *matrices]:
        weight = target.weight.parameter
        if not isinstance(weight, nn.Parameter):
            raise UsageError(
                f"{target.name}: its weight is computed from other tensors (a parametrization such as weight "
                f"norm), so it can be neither set nor frozen. Remove that first"
            )
        if weight.is_meta:
            raise UsageError(f"{target.name} is on the meta device: load or draw the weights, then apply")
        if chosen.init != "keep" and not weight.is_floating_point():
            raise UsageError(f"{target.name} holds {weight.dtype}, which is quantised: apply, then quantise")
        if chosen.init in ("qr", "polar"):
            try:
                start_of(chosen, 0, target)
            except OelmError as error:
                raise UsageError(f"{target.name}: {error}") from None


def check_head_sizes(chosen: Method, projections: list[Projection]) -> None:
    """Before anything is changed: the start of the last layer must not fail after that of the first."""
    for p in projections if chosen.init in ("headwise", "qr", "polar") else []:
        d_in = p.heads().shape[-1]
        if p.role in chosen.parts and p.head_dim > d_in:
            raise UsageError(
                f"{p.name}: a head of {p.head_dim} rows cannot have orthonormal rows in {d_in} dimensions; "
                f'use init "normal-matched" or "global", or more and smaller heads'
            )


def check_ties(
    model: nn.Module, chosen: Method, projections: list[Projection], matrices: list[FeedForward]
) -> None:
    """A tensor that also serves elsewhere (tied) must not be redrawn or frozen by accident."""
    if chosen.touches_nothing:
        return
    targets: list[Projection | FeedForward] = [p for p in projections if p.role in chosen.parts]
    shared = owners(model)
    for target in [*targets, *matrices]:
        names = shared[id(target.weight.parameter)]
        if len(names) > 1:
            raise UsageError(
                f"{target.name} is tied: {' and '.join(names)} are one tensor, so '{chosen.name}' "
                f"would change both. Untie them first (give one its own nn.Parameter)"
            )


def owners(model: nn.Module) -> dict[int, list[str]]:
    """By id, the names under which modules hold each parameter; a module that is listed twice counts once."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{name}.{attribute}" if name else attribute)
    return names


def check_extras(chosen: Method, projections: list[Projection]) -> None:
    for p in projections:
        kind, ours = type(p.attention).__name__, not type(p.attention).__module__.startswith("transformers.")
        if chosen.has_extras and isinstance(p.attention, nn.MultiheadAttention):
            raise UsageError(
                f"method '{chosen.name}' adds trainable parts to the projections, for which "
                f"torch.nn.MultiheadAttention ({p.attention_name or 'the model itself'}) has no place"
            )
        if chosen.extends_qk and not p.fused and not is_matrix(p.weight.owner):
            raise OelmError(
                f"method '{chosen.name}' adds trainable parts to linear projections; {p.name} is a "
                f"{type(p.weight.owner).__name__}"
            )
        causal = getattr(p.attention, "is_causal", getattr(p.attention, "causal", ours))
        unordered = causal is not True
        if (chosen.conv or chosen.conv_value) and unordered:
            raise UsageError(
                f"method '{chosen.name}' convolves causally over time; {p.attention_name} ({kind}) is not a "
                f"causal self-attention, or does not say so (is_causal)"
            )
        if chosen.conv_value:
            _check_values(chosen, p)
        norms = {name for name, m in p.attention.named_children() if name in QUERY_NORMS and _by_head(m, p)}
        if chosen.temperature and norms:
            raise UsageError(
                f"method '{chosen.name}' scales the queries of a head; {p.attention_name} ({kind}) "
                f"normalises them ({', '.join(sorted(norms))}), which would undo it. "
                f"Use dataclasses.replace(method, temperature=False)"
            )
        if chosen.relative_bias and not hasattr(p.attention, "add_relative_bias"):
            raise UsageError(
                f"method '{chosen.name}' needs an attention that adds a relative bias to its scores; {kind} "
                f"does not. oelm's own GPT does, and any attention with a method add_relative_bias(span)"
            )


def _by_head(norm: nn.Module, p: Projection) -> bool:
    """Whether it normalises each head for itself; over all heads at once, their proportions stay."""
    sizes = {t.numel() for t in norm.parameters()}
    return not isinstance(norm, nn.Identity) and (not sizes or p.head_dim in sizes)


def _check_values(chosen: Method, p: Projection) -> None:
    """There must be one value projection; a fused one is split off by name before it is extended."""
    way_out = "use dataclasses.replace(method, conv_value=0)"
    found = value_projections(p.attention)
    if len(found) + p.fused != 1:
        raise UsageError(
            f"method '{chosen.name}' convolves v; {p.attention_name} ({type(p.attention).__name__}) "
            f"has no single projection with such a name (v, v_proj, value, ...); {way_out}"
        )
    for name in found:
        weight = p.attention.get_submodule(name).weight
        if not isinstance(weight, nn.Parameter) or weight.is_meta:
            raise UsageError(
                f"{p.attention_name}.{name}: its weight is computed from others or on the meta device, so "
                f"nothing can be added to it; {way_out}"
            )


def warn_if_trained_weights_are_discarded(
    model: nn.Module, chosen: Method, projections: list[Projection]
) -> None:
    """from_pretrained marks each tensor it filled, which a fresh model built from a config does not carry."""
    if not chosen.draws or not {"q", "k"} & set(chosen.parts):
        return
    if any(getattr(p.weight.parameter, "_is_hf_initialized", False) for p in projections):
        origin = getattr(model, "name_or_path", "") or "a checkpoint"
        warnings.warn(
            f"'{chosen.name}' discards the trained Q/K that {type(model).__name__} was loaded with "
            f"({origin}). '{PRETRAINED_DEFAULT}' keeps and freezes them",
            stacklevel=3,
        )


def check_adapters(
    model: nn.Module, chosen: Method, projections: list[Projection], matrices: list[FeedForward]
) -> None:
    """A PEFT adapter would train what the method freezes, or be lost where a module is replaced."""
    adapters = {id(base_layer(m)): name for name, m in model.named_modules() if is_adapter(m)}
    if not adapters:
        return
    splits = not chosen.trains_qk or chosen.has_extras
    touched: list[nn.Module] = []
    for p in projections:
        freezes = p.role in chosen.parts and freeze_and_thaw_times(chosen, p.place)[0] is not None
        if freezes or chosen.extends_qk or (p.fused and splits):
            touched.append(p.weight.owner)
        if chosen.conv_value:
            touched += [base_layer(p.attention.get_submodule(v)) for v in value_projections(p.attention)]
    touched += [m.weight.owner for m in matrices if freeze_and_thaw_times(chosen, m.place)[0] is not None]
    names = [adapters[id(module)] for module in touched if id(module) in adapters]
    if names:
        raise OelmError(
            f"{names[0]} carries a PEFT adapter, but '{chosen.name}' freezes or replaces that layer. "
            f"Leave it out of target_modules (for a fused Q/K/V: apply first, then target its value part, "
            f"such as 'c_attn.v'), or merge the adapter first (merge_and_unload)"
        )
