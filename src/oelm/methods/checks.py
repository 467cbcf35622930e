"""Check that a method can be applied to a model.

`oelm.apply` makes all checks before it changes anything, so that an error never leaves a model with only some
layers changed.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import OelmError, UsageError
from oelm.methods.extras.split import SplitMultiheadAttention
from oelm.methods.install import initial_weight, targets_of
from oelm.methods.method import Method
from oelm.methods.presets import PRETRAINED_DEFAULT
from oelm.methods.reading.find import value_projections
from oelm.methods.reading.projection import (
    FeedForward,
    Projection,
    is_matrix,
    is_transposed,
    names_by_module,
)
from oelm.methods.reading.wrappers import base_layer, is_adapter
from oelm.methods.record import freeze_and_thaw_times, modules_with_record, record_of

QUERY_NORMS = (
    *("q_norm", "q_layernorm", "q_layer_norm", "q_ln", "query_layernorm", "query_norm", "q_b_norm"),
    *("qk_norm", "q_a_layernorm"),  # Llama 4, and the low-rank queries of DeepSeek
)

#: The dtypes of weights that oelm can initialise; others, such as float8, belong to quantised layers.
_WRITABLE_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed must be a non-negative integer, got {seed!r} ({type(seed).__name__})")


def check_no_method_yet(model: nn.Module) -> None:
    """Raise OelmError if a method was already applied to the model or to one of its submodules."""
    if (earlier := record_of(model)) is not None:
        raise OelmError(
            f"method '{earlier.method.name}' was already applied to this model, and a second one would act "
            f"on frozen weights. Call oelm.remove(model) first, or build or load the model again"
        )
    if inside := modules_with_record(model):
        raise OelmError(
            f"a method was already applied to the submodule '{inside[0]}'. Call oelm.remove on this "
            f"submodule first, or build or load the model again"
        )


def check_before_apply(
    model: nn.Module, method: Method, projections: list[Projection], matrices: list[FeedForward]
) -> None:
    """Raise an error if the method cannot be applied to the model; warn if it discards trained weights."""
    targets = targets_of(method, projections, matrices)
    if "ffn" in method.parts and not matrices:
        raise UsageError(
            f"method '{method.name}' acts on FFN matrices, but where= and exclude= select none. Select "
            f"modules with FFN matrices, or use a method that acts only on q and k"
        )
    _check_adapters(model, method, projections, matrices)
    method.check_depth(max(p.place.depth for p in projections))
    _check_repeated_layers(method, projections)
    _check_something_is_frozen(method, targets)
    _check_head_sizes(method, projections)
    if not method.changes_nothing:
        for target in targets:
            _check_weight(method, target)
        _check_not_tied(model, method, targets)
    for p in projections:
        _check_extras(method, p)
    _warn_if_trained_weights_are_discarded(model, method, targets)


def _check_adapters(
    model: nn.Module, method: Method, projections: list[Projection], matrices: list[FeedForward]
) -> None:
    """Raise OelmError if a layer that the method freezes or replaces has a PEFT adapter.

    The adapter would change the outputs of a frozen layer; with a replaced layer, it would be lost.
    """
    adapters = {id(base_layer(m)): name for name, m in model.named_modules() if is_adapter(m)}
    if not adapters:
        return
    splits = not method.trains_qk or method.has_extras
    touched: list[nn.Module] = []
    for p in projections:
        freezes = p.role in method.parts and freeze_and_thaw_times(method, p.place)[0] is not None
        if freezes or method.extends_qk or (p.fused and splits):
            touched.append(p.weight.owner)
        if method.conv_value:
            touched += [base_layer(p.attention.get_submodule(v)) for v in value_projections(p.attention)]
    touched += [m.weight.owner for m in matrices if freeze_and_thaw_times(method, m.place)[0] is not None]
    names = [adapters[id(module)] for module in touched if id(module) in adapters]
    if names:
        raise OelmError(
            f"{names[0]} has a PEFT adapter, but '{method.name}' freezes or replaces that layer. "
            f"Leave the layer out of target_modules (for a fused Q/K/V: call oelm.apply before "
            f"get_peft_model, and target the value part, such as 'c_attn.v'), or merge the adapter first "
            f"(merge_and_unload)"
        )


def _check_something_is_frozen(method: Method, targets: list[Projection | FeedForward]) -> None:
    frozen = [t for t in targets if freeze_and_thaw_times(method, t.place)[0] is not None]
    if method.freeze != "none" and not frozen:
        raise UsageError(
            f"method '{method.name}' freezes none of the modules that where= and exclude= select. Select "
            f"other modules; oelm.preview(model, 'oelm-freeze') lists all. Layers are counted in the whole "
            f"model, not only among the selected modules"
        )


def _check_repeated_layers(method: Method, projections: list[Projection]) -> None:
    """Raise UsageError if one layer is at several places of the model that the method treats differently."""
    for p in projections:
        places = (p.place, *p.place.others)
        if len({(freeze_and_thaw_times(method, at), method.rank_in(at.layer)) for at in places}) > 1:
            raise UsageError(
                f"{' and '.join(at.module for at in places)} are one layer, but '{method.name}' treats these "
                f"places differently. Give each place its own layer (copy.deepcopy), or use a method that "
                f"treats all layers alike, such as oelm-freeze"
            )


def _check_head_sizes(method: Method, projections: list[Projection]) -> None:
    for p in projections if method.init in ("headwise", "qr", "polar") else []:
        d_in = p.heads().shape[-1]
        if p.role in method.parts and p.head_dim > d_in:
            raise UsageError(
                f"{p.name}: a head of {p.head_dim} rows cannot have orthonormal rows in {d_in} dimensions; "
                f'use init "normal-matched" or "global", or more and smaller heads'
            )


def _check_weight(method: Method, target: Projection | FeedForward) -> None:
    weight = target.weight.parameter
    if not isinstance(weight, nn.Parameter):
        raise UsageError(
            f"{target.name}: the weight is computed from other tensors (a parametrization such as weight "
            f"norm), so oelm can neither initialise nor freeze it. Remove the parametrization first"
        )
    if weight.is_meta:
        raise UsageError(f"{target.name} is on the meta device; load or initialise its weights first")
    if method.init != "keep" and weight.dtype not in _WRITABLE_TYPES:
        raise UsageError(f"{target.name} is quantised ({weight.dtype}); call oelm.apply before quantising")
    if method.init in ("qr", "polar"):
        try:
            initial_weight(method, 0, target)
        except OelmError as error:
            raise UsageError(f"{target.name}: {error}") from None


def _check_not_tied(model: nn.Module, method: Method, targets: list[Projection | FeedForward]) -> None:
    """Raise UsageError if a target's weight is tied, because the module that shares it would change, too."""
    shared, modules = names_by_parameter(model), names_by_module(model)
    for target in targets:
        names = shared[id(target.weight.parameter)]
        if len(names) > 1:
            raise UsageError(
                f"{target.name} has tied weights: {' and '.join(names)} are one tensor, so '{method.name}' "
                f"would change all of them. Untie them first (give each its own nn.Parameter)"
            )
        if others := _names_elsewhere(model, target, modules):
            raise UsageError(
                f"{target.name} and {others[0]} are one module, so '{method.name}' would change both. Give "
                f"each its own module (copy.deepcopy), or share the whole layer"
            )


def _names_elsewhere(
    model: nn.Module, target: Projection | FeedForward, modules: dict[int, list[str]]
) -> list[str]:
    """Return the names under which the module of a target is also part of something else.

    If the whole attention or FFN module has several names, the target may have a name in each of them.

    modules: The names of each module, from `names_by_module()`.
    """
    around = target.attention_name if isinstance(target, Projection) else target.name.rpartition(".")[0]
    names = modules[id(target.weight.owner)]
    own = next(name for name in names if not around or name == around or name.startswith(f"{around}."))
    expected = {name + own.removeprefix(around) for name in modules[id(model.get_submodule(around))]}
    return [name for name in names if name not in expected]


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Return a dict from id(parameter) to all names of that parameter; a tied parameter has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{name}.{attribute}" if name else attribute)
    return names


def _check_extras(method: Method, p: Projection) -> None:
    kind, where = type(p.attention).__name__, p.attention_name or "the model"
    if method.has_extras and isinstance(p.attention, nn.MultiheadAttention):
        raise UsageError(
            f"method '{method.name}' adds trainable extras to the projections, but the projections of "
            f"torch.nn.MultiheadAttention ({where}) are not modules, so they cannot be extended. Use a "
            f"method without extras, such as oelm-freeze"
        )
    forwards = (nn.MultiheadAttention.forward, SplitMultiheadAttention.forward)
    if isinstance(p.attention, nn.MultiheadAttention) and type(p.attention).forward not in forwards:
        raise UsageError(
            f"{where} is a {kind}, which replaces the forward function of torch.nn.MultiheadAttention. oelm "
            f"splits the packed weights of that class, and the function of {kind} would be lost. Register "
            f"the class with oelm.register_attention, or use torch.nn.MultiheadAttention itself"
        )
    if method.extends_qk and not p.fused and not is_matrix(p.weight.owner):
        raise OelmError(
            f"method '{method.name}' adds trainable extras, which need a linear projection, but {p.name} is "
            f"a {type(p.weight.owner).__name__}. Use a method without extras, such as oelm-freeze"
        )
    replaces = method.extends_qk or (p.fused and not method.changes_nothing)
    if replaces and not _is_plain_linear(p.weight.owner):
        raise UsageError(
            f"method '{method.name}' replaces {p.name} by a plain linear layer, but its class "
            f"{type(p.weight.owner).__name__} computes something else than W x + b (or has more parameters), "
            f"which would be lost. Call oelm.apply before this class takes the place of the layer"
        )
    if (method.conv or method.conv_value) and not _is_causal(p.attention):
        raise UsageError(
            f"method '{method.name}' adds a causal convolution, but {where} ({kind}) is not a causal "
            f"self-attention: its attribute is_causal is missing or False. Use a method without convolution"
        )
    if method.conv_value:
        _check_value_projection(method, p)
    norms = {name for name, m in p.attention.named_children() if name in QUERY_NORMS and _is_per_head(m, p)}
    if isinstance(getattr(p.attention, "logit_scale", None), Tensor):
        norms.add("logit_scale")  # cosine attention, which scales normalised q and k (Swin v2)
    if method.temperature and norms:
        raise UsageError(
            f"method '{method.name}' adds a temperature per head, but {where} ({kind}) normalises the "
            f"queries of each head ({', '.join(sorted(norms))}), so the temperature would have no effect. "
            f"Use dataclasses.replace(method, temperature=False)"
        )
    if method.relative_bias and not hasattr(p.attention, "add_relative_bias"):
        raise UsageError(
            f"method '{method.name}' adds a relative bias to the attention scores, which {kind} does not "
            f"support: it has no function add_relative_bias(span), unlike the attention of oelm's own GPT. "
            f"Use a method without relative bias"
        )


@torch.no_grad()
def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a linear layer computes W x + b; a class with a `forward` of its own is tried out.

    A layer with more parameters, such as a LoRA adapter, is not plain. A layer that cannot be tried out,
    because it needs another input or another device, counts as plain.
    """
    if not is_matrix(module):
        return True
    if {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
        return False
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        tried: Any = copy.deepcopy(module).cpu().float().eval()
        weight = tried.weight.t() if is_transposed(module) else tried.weight
        x = torch.randn(2, 3, weight.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
        got, want = tried.forward(x), nn.functional.linear(x, weight, tried.bias)
        return got.shape == want.shape and torch.allclose(got, want, rtol=1e-3, atol=1e-4)
    except Exception:  # code of another library, which may raise anything
        return True


def _is_causal(attention: nn.Module) -> bool:
    """Return whether an attention module is causal, according to its attribute `is_causal` or `causal`.

    Without either attribute, a class of the transformers library counts as not causal, any other as causal.
    """
    default = not type(attention).__module__.startswith("transformers.")
    return getattr(attention, "is_causal", getattr(attention, "causal", default)) is True


def _is_per_head(norm: nn.Module, p: Projection) -> bool:
    """Return whether a norm acts on each head separately, so that it would cancel a head's temperature."""
    sizes = {t.numel() for t in norm.parameters()}
    return not isinstance(norm, nn.Identity) and (not sizes or p.head_dim in sizes)


def _check_value_projection(method: Method, p: Projection) -> None:
    """Raise UsageError unless the attention module has exactly one value projection.

    A fused Q/K/V projection counts as one.
    """
    advice = "use dataclasses.replace(method, conv_value=0)"
    found = value_projections(p.attention)
    if len(found) + p.fused != 1:
        raise UsageError(
            f"method '{method.name}' adds a convolution to v, but {p.attention_name} "
            f"({type(p.attention).__name__}) does not have exactly one projection with a known name for "
            f"the values (v, v_proj, value, ...); {advice}"
        )
    for name in found:
        weight = p.attention.get_submodule(name).weight
        if not isinstance(weight, nn.Parameter) or weight.is_meta:
            raise UsageError(
                f"{p.attention_name}.{name}: the weight is computed from other tensors or is on the meta "
                f"device, so no convolution can be added; {advice}"
            )


def _warn_if_trained_weights_are_discarded(
    model: nn.Module, method: Method, targets: list[Projection | FeedForward]
) -> None:
    if not method.has_random_init:
        return
    # from_pretrained() sets `_is_hf_initialized` on every tensor that it loads; a model that was built from
    # a config has no tensor with this attribute.
    trained = [t for t in targets if getattr(t.weight.parameter, "_is_hf_initialized", False)]
    if trained:
        kinds = {"FFN" if isinstance(t, FeedForward) else "query and key" for t in trained}
        origin = getattr(model, "name_or_path", "") or "a checkpoint"
        advice = (
            f"'{PRETRAINED_DEFAULT}'" if "FFN" not in kinds else 'dataclasses.replace(method, init="keep")'
        )
        warnings.warn(
            f"'{method.name}' replaces the trained {' and '.join(sorted(kinds))} weights of "
            f"{type(model).__name__} (loaded from {origin}) by random ones. To keep and freeze them, use "
            f"{advice}",
            stacklevel=5,
        )
