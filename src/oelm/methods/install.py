"""Change a model as a method says: split fused weights, initialise, add extras, and attach a `Record`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oelm.errors import OelmError
from oelm.methods import orthogonal
from oelm.methods.extras.extended import EXTRAS, ExtendedProjection, mask_padding_in_conv
from oelm.methods.extras.split import SplitProjection, split_multihead
from oelm.methods.method import Method
from oelm.methods.reading.feed_forward import ffn_matrices
from oelm.methods.reading.find import find_projections, value_projections
from oelm.methods.reading.projection import FeedForward, Projection, is_transposed
from oelm.methods.reading.select import ALL, Selection
from oelm.methods.reading.wrappers import plain_parameters, uses_peft
from oelm.methods.record import Record, TensorRecord, attach_record, freeze_and_thaw_times


@torch.no_grad()
def install(model: nn.Module, method: Method, seed: int, *, init: bool, selection: Selection = ALL) -> Record:
    """Change the model's architecture as the method says; attach a `Record` to the model and return it.

    Nothing is frozen yet; `follow_schedule()` does that.

    init: Whether to initialise the weights, too; False if they will be loaded from a file.
    """
    projections = find_projections(model, selection)
    replaced: list[tuple[str, nn.Module]] = []
    if not method.trains_qk or method.has_extras:
        replaced = _split_fused(model, projections)
        if any(p.fused for p in projections):
            projections = find_projections(model, selection)
    matrices = ffn_matrices(model, selection) if "ffn" in method.parts else []
    if init and method.init != "keep":
        for target in targets_of(method, projections, matrices):
            target.weight.write(initial_weight(method, seed, target))
            if method.has_random_init and target.bias is not None:
                target.bias.view().zero_()
    record = _make_record(model, method, seed, projections, matrices)
    record.selection, record.replaced = selection, replaced
    _add_extras(model, method, seed, projections, record)
    attach_record(model, record)
    if any(hasattr(type(module), "save_pretrained") for module in model.modules()):
        from oelm.methods.saving.pretrained import replace_save_pretrained

        replace_save_pretrained(model)
    return record


def targets_of(
    method: Method, projections: list[Projection], matrices: list[FeedForward]
) -> list[Projection | FeedForward]:
    """Return the projections and FFN matrices on which the method's `init` and `freeze` act."""
    return [*(p for p in projections if p.role in method.parts), *matrices]


def initial_weight(method: Method, seed: int, target: Projection | FeedForward) -> torch.Tensor:
    """Return the initial weights of a projection or FFN matrix according to the method's `init`.

    The model is not changed.
    """
    generator = orthogonal.generator_for(seed, target.name) if method.has_random_init else None
    init = method.init
    if isinstance(target, Projection):
        old = target.heads()
    else:
        old = target.weight.view()  # (1, rows, d_in): an FFN matrix counts as one head
        init = "global" if init == "headwise" else init
    if init in ("qr", "polar") and old.shape[-2] > old.shape[-1]:
        return orthogonal.init_weight(init, method.gain, old.mT, generator).mT
    return orthogonal.init_weight(init, method.gain, old, generator)


def _split_fused(model: nn.Module, projections: list[Projection]) -> list[tuple[str, nn.Module]]:
    """Replace each fused Q/K/V module by separate projections; return (name, fused module) of each.

    The returned modules have no weights any more.
    """
    done: set[int] = set()
    replaced = []
    for p in (p for p in projections if p.fused):
        if isinstance(p.attention, nn.MultiheadAttention):
            if id(p.attention) not in done:
                split_multihead(p.attention)
            done.add(id(p.attention))
        elif id(p.weight.owner) not in done:
            assert p.weight.layout is not None
            done.add(id(p.weight.owner))
            fused: Any = p.weight.owner
            name = p.name.rpartition(".")[0]
            replace_module(model, name, SplitProjection(fused, p.weight.layout, p.weight.transposed))
            fused.weight = fused.bias = None  # frees memory; `oelm.remove()` sets weight and bias again
            replaced.append((name, fused))
    return replaced


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the module `name` by `new`, under every name that it has in the model; `new` gets its hooks."""
    old = model.get_submodule(name)
    for attribute, hooks in vars(old).items():
        if attribute.startswith(("_forward_", "_backward_", "_is_full_backward_")):
            setattr(new, attribute, hooks)
    for module in list(model.modules()):
        for child, value in list(module._modules.items()):
            if value is old:
                module._modules[child] = new


def _make_record(
    model: nn.Module,
    method: Method,
    seed: int,
    projections: list[Projection],
    matrices: list[FeedForward],
) -> Record:
    parameters = plain_parameters(model)
    names = {id(p): name for name, p in parameters.items()}
    record = Record(method, seed, {})
    record.frozen_before = [name for name, p in parameters.items() if not p.requires_grad]
    tracked: list[Projection | FeedForward] = [p for p in projections if not p.fused]
    for target in [*tracked, *matrices]:
        for tensor in _tensor_records(method, names, target):
            record.tensors[tensor.name] = tensor
    # No schedule trains what the user froze. PEFT freezes every parameter, which says nothing about Q and K.
    if len(record.frozen_before) < len(parameters) and not uses_peft(model):
        for name in set(record.frozen_before) & set(record.tensors):
            if record.tensors[name].ever_frozen:
                record.tensors[name].freezes_at, record.tensors[name].thaws_at = 0.0, None
    return record


def _tensor_records(
    method: Method, names: dict[int, str], target: Projection | FeedForward
) -> list[TensorRecord]:
    """Return a `TensorRecord` each for the weight and the bias (if any) of a projection or FFN matrix.

    `names` maps the id of a parameter to its name.
    """
    if isinstance(target, Projection):
        part, heads, head_dim = target.role, target.num_heads, target.head_dim
    else:
        part, heads, head_dim = "ffn", 1, target.weight.view().shape[1]
    freezes_at, thaws_at = None, None
    if part in method.parts:
        freezes_at, thaws_at = freeze_and_thaw_times(method, target.place)
    always_frozen = freezes_at == 0.0 and thaws_at is None
    return [
        TensorRecord(
            name=names[id(where.parameter)],
            part=part,
            kind=kind,
            num_heads=heads,
            head_dim=head_dim,
            transposed=where.transposed,
            rebuildable=always_frozen and method.has_random_init and method.gain != "match",
            freezes_at=freezes_at,
            thaws_at=thaws_at,
        )
        for kind, where in (("weight", target.weight), ("bias", target.bias))
        if where is not None
    ]


def _add_extras(
    model: nn.Module, method: Method, seed: int, projections: list[Projection], record: Record
) -> None:
    def extend(
        name: str, base: nn.Module, role: str, heads: int, head_dim: int, adds: Method, layer: int = 0
    ) -> None:
        extended = ExtendedProjection(base, role, heads, head_dim, is_transposed(base), adds, layer)
        extended.init_extras(seed, name)
        replace_module(model, name, extended)
        record.replaced.append((name, base))
        record.extras += [f"{name}.{extra}" for extra in EXTRAS if getattr(extended, extra) is not None]

    attentions = {p.attention_name: p.attention for p in projections}
    if method.extends_qk:
        for p in projections:
            extend(p.name, p.weight.owner, p.role, p.num_heads, p.head_dim, method, p.place.layer)
    if method.conv_value:
        on_v = Method(f"{method.name} on v", conv=method.conv_value)  # no other extra: v is not frozen
        for name, attention in attentions.items():
            (own,) = value_projections(attention)
            extend(f"{name}.{own}" if name else own, attention.get_submodule(own), "v", 1, 1, on_v)
    if method.conv or method.conv_value:
        _disable_cache(model, attentions, record)
        for attention in attentions.values():
            mask_padding_in_conv(attention)
    if method.relative_bias:
        for name, attention in attentions.items():
            attention.add_relative_bias(method.relative_bias)  # type: ignore[operator]
            record.extras.append(f"{name}.relative_bias" if name else "relative_bias")


def _disable_cache(model: nn.Module, attentions: dict[str, nn.Module], record: Record) -> None:
    """Turn off the key/value cache of a model with convolutions over time.

    With the cache, the input of a projection is only the new token, but a convolution needs earlier ones.
    """
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "use_cache"):
            record.use_cache[name] = config.use_cache
            config.use_cache = False
    for attention in attentions.values():
        attention.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def _refuse_cache(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    for name in ("past_key_values", "past_key_value", "layer_past"):
        cache = kwargs.get(name)
        if cache is not None and getattr(cache, "get_seq_length", lambda: 1)() > 0:
            raise OelmError(
                "the model was called with a key/value cache, but the convolution of its method needs all "
                "earlier tokens. Call the model with use_cache=False"
            )
