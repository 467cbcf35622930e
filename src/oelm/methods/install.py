"""Putting a method into a model: split what is fused, set the starts, add the extras, write the record."""

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
from oelm.methods.reading.find import is_transposed, qk_projections, value_projections
from oelm.methods.reading.projection import FeedForward, Projection
from oelm.methods.reading.wrappers import plain_parameters
from oelm.methods.record import Record, TensorRecord, attach_record, freeze_and_thaw_times
from oelm.methods.saving.pretrained import replace_save_pretrained


@torch.no_grad()
def install(model: nn.Module, chosen: Method, seed: int, *, init: bool) -> Record:
    """Give the model the structure of a method and its record; freezes nothing yet.

    init: Also initialise the weights. False when the weights come from a file.
    """
    projections = qk_projections(model)
    if not chosen.trains_qk or chosen.has_extras:
        _split_fused(model, projections)
        projections = qk_projections(model)
    matrices = ffn_matrices(model) if "ffn" in chosen.parts else []
    targets: list[Projection | FeedForward] = [p for p in projections if p.role in chosen.parts]
    if init and chosen.init != "keep":
        for target in [*targets, *matrices]:
            _start(chosen, seed, target)
    parameters = plain_parameters(model)
    names = {id(p): name for name, p in parameters.items()}
    record = Record(chosen, seed, {})
    record.frozen_before = [name for name, p in parameters.items() if not p.requires_grad]
    tracked: list[Projection | FeedForward] = [p for p in projections if not p.fused]
    for target in [*tracked, *matrices]:
        _remember(record, names, target)
    _add_extras(model, chosen, seed, projections, record)
    attach_record(model, record)
    replace_save_pretrained(model)
    return record


def _split_fused(model: nn.Module, projections: list[Projection]) -> None:
    done: set[int] = set()
    for p in (p for p in projections if p.fused):
        if isinstance(p.attention, nn.MultiheadAttention):
            if id(p.attention) not in done:
                split_multihead(p.attention)
            done.add(id(p.attention))
        elif id(p.weight.owner) not in done:
            assert p.weight.layout is not None
            done.add(id(p.weight.owner))
            split = SplitProjection(p.weight.owner, p.weight.layout, p.weight.transposed)
            _replace(model, p.name.rpartition(".")[0], split)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where `name` is, wherever else the model refers to the same module."""
    old = model.get_submodule(name)
    for module in list(model.modules()):
        for child, value in list(module._modules.items()):
            if value is old:
                module._modules[child] = new


def start_of(chosen: Method, seed: int, target: Projection | FeedForward) -> torch.Tensor:
    """What the method makes of a target's weights; changes nothing."""
    generator = orthogonal.generator_for(seed, target.name) if chosen.draws else None
    init = chosen.init
    if isinstance(target, Projection):
        before = target.heads()
    else:
        before = target.weight.view()  # (1, rows, d_in): one head
        init = "global" if init == "headwise" else init
    if init in ("qr", "polar") and before.shape[-2] > before.shape[-1]:
        return orthogonal.init_weight(init, chosen.gain, before.mT, generator).mT
    return orthogonal.init_weight(init, chosen.gain, before, generator)


def _start(chosen: Method, seed: int, target: Projection | FeedForward) -> None:
    target.weight.write(start_of(chosen, seed, target))
    if chosen.draws and target.bias is not None:
        target.bias.view().zero_()


def _remember(record: Record, names: dict[int, str], target: Projection | FeedForward) -> None:
    chosen = record.method
    if isinstance(target, Projection):
        part, heads, head_dim = target.role, target.num_heads, target.head_dim
    else:
        part, heads, head_dim = "ffn", 1, target.weight.view().shape[1]
    acts = part in chosen.parts
    freezes_at, thaws_at = freeze_and_thaw_times(chosen, target.place) if acts else (None, None)
    always_frozen = freezes_at == 0.0 and thaws_at is None
    for kind, window in (("weight", target.weight), ("bias", target.bias)):
        if window is None:
            continue
        name = names[id(window.parameter)]
        record.tensors[name] = TensorRecord(
            name=name,
            part=part,
            kind=kind,
            stack=target.place.stack,
            layer=target.place.layer,
            num_heads=heads,
            head_dim=head_dim,
            transposed=window.transposed,
            rebuildable=always_frozen and chosen.draws and chosen.gain != "match",
            freezes_at=freezes_at,
            thaws_at=thaws_at,
        )


def _add_extras(
    model: nn.Module, chosen: Method, seed: int, projections: list[Projection], record: Record
) -> None:
    def extend(name: str, base: nn.Module, role: str, heads: int, head_dim: int, wish: Method) -> None:
        extended = ExtendedProjection(base, role, heads, head_dim, is_transposed(base), wish)
        extended.init_extras(seed, name)
        _replace(model, name, extended)
        record.extras += [f"{name}.{extra}" for extra in EXTRAS if getattr(extended, extra) is not None]

    attentions = {p.attention_name: p.attention for p in projections}
    if chosen.extends_qk:
        for p in projections:
            extend(p.name, p.weight.owner, p.role, p.num_heads, p.head_dim, chosen)
    if chosen.conv_value:
        for name, attention in attentions.items():
            (own,) = value_projections(attention)
            extend(f"{name}.{own}" if name else own, attention.get_submodule(own), "v", 1, 1, _taps(chosen))
    if chosen.conv or chosen.conv_value:
        _refuse_caches(model, attentions)
        for attention in attentions.values():
            mask_padding_in_conv(attention)
    if chosen.relative_bias:
        for name, attention in attentions.items():
            attention.add_relative_bias(chosen.relative_bias)  # type: ignore[operator]
            record.extras.append(f"{name}.relative_bias" if name else "relative_bias")


def _taps(chosen: Method) -> Method:
    """What v gets of a method: it trains anyway, so the convolution alone."""
    return Method(f"{chosen.name} on v", conv=chosen.conv_value)


def _refuse_caches(model: nn.Module, attentions: dict[str, nn.Module]) -> None:
    """Incremental decoding shows a projection one token at a time; a convolution needs those before it."""
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if hasattr(config, "use_cache"):
            config.use_cache = False  # type: ignore[union-attr]
    for attention in attentions.values():
        attention.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def _refuse_cache(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    for name in ("past_key_values", "past_key_value", "layer_past"):
        cache = kwargs.get(name)
        if cache is not None and getattr(cache, "get_seq_length", lambda: 1)() > 0:
            raise OelmError("the convolution needs the tokens before: call with use_cache=False")
