"""Split a fused Q/K/V weight into one parameter each for Q, K and V, so that Q and K can be frozen without V.

A frozen part gets no gradient, no optimizer state and no weight decay, and costs no weight-gradient FLOPs.
State dicts keep the keys and shapes of the fused weight, so that the plain model can load files of the split
model, and the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oelm.methods.reading.projection import RowLayout


class SplitProjection(nn.Module):
    """A fused Linear (or transformers' Conv1D) split into one Linear per role, with the same output.

    The roles, such as "q", "k" and "v", and the order of the rows are given by `layout`.
    """

    def __init__(self, fused: nn.Module, layout: RowLayout, transposed: bool) -> None:
        super().__init__()
        self.layout, self.transposed = layout, transposed
        weight, bias = fused.weight, fused.bias
        assert isinstance(weight, Tensor)
        columns = weight if transposed else weight.t()  # (d_in, rows)
        for role, part in zip(layout.roles, layout.split(columns.detach()), strict=True):
            self.add_module(role, _linear(_own_parameter(part.t(), like=weight)))
        if isinstance(bias, Tensor):
            for role, part in zip(layout.roles, layout.split(bias.detach()), strict=True):
                getattr(self, role).bias = _own_parameter(part, like=bias)
        self.train(fused.training)
        self.register_state_dict_post_hook(_join_keys)
        self.register_load_state_dict_pre_hook(_split_keys)

    def forward(self, x: Tensor) -> Tensor:
        return self.layout.join([getattr(self, role)(x) for role in self.layout.roles])

    @property
    def weight(self) -> Tensor:
        """The fused weight, for code of other libraries that reads its dtype, device or norm."""
        columns = self.layout.join([getattr(self, role).weight.t() for role in self.layout.roles])
        return columns if self.transposed else columns.t()

    @property
    def bias(self) -> Tensor | None:
        parts = [getattr(self, role).bias for role in self.layout.roles]
        return None if parts[0] is None else self.layout.join(parts)


def _linear(weight: nn.Parameter) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


def _own_parameter(part: Tensor, *, like: Tensor) -> nn.Parameter:
    """Return a copy of `part` as a parameter that requires gradients if the fused tensor `like` does."""
    own = part.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(own, requires_grad=like.requires_grad)


def _join_keys(module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    assert isinstance(module, SplitProjection)
    for kind in ("weight", "bias"):
        names = [f"{prefix}{role}.{kind}" for role in module.layout.roles]
        if not all(name in state for name in names):
            continue  # the projection has no bias, or PEFT renamed the keys of an adapted part
        found = [state.pop(name) for name in names]
        if kind == "bias":
            state[prefix + kind] = module.layout.join(found)
        else:
            columns = module.layout.join([p.t() for p in found])
            state[prefix + kind] = columns.contiguous() if module.transposed else columns.t().contiguous()


def _split_keys(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    assert isinstance(module, SplitProjection)
    if (weight := state.pop(f"{prefix}weight", None)) is not None:
        for role, part in zip(
            module.layout.roles, module.layout.split(weight if module.transposed else weight.t()), strict=True
        ):
            state[f"{prefix}{role}.weight"] = part.t()
    if (bias := state.pop(f"{prefix}bias", None)) is not None:
        for role, part in zip(module.layout.roles, module.layout.split(bias), strict=True):
            state[f"{prefix}{role}.bias"] = part


class SplitMultiheadAttention(nn.MultiheadAttention):
    """torch's MultiheadAttention with separate weights and biases for q, k and v instead of packed ones.

    With gradients enabled, it uses the code path that torch has for different key and value widths. Without
    gradients, its properties return the packed tensors, so that torch's fused inference kernels still work.
    """

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return bool(self._was_packed) and not torch.is_grad_enabled()

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        if not self._was_packed:
            return None
        return torch.cat([self.q_proj_weight, self.k_proj_weight, self.v_proj_weight])

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        parts = [self._parameters[f"{part}_proj_bias"] for part in _PARTS]
        return None if parts[0] is None else torch.cat([p for p in parts if p is not None])


_PARTS = ("q", "k", "v")


def split_multihead(attention: nn.MultiheadAttention) -> None:
    """Split the packed weights of torch's attention module in place.

    The module object is not replaced, because other objects may refer to it.
    """
    packed = attention._qkv_same_embed_dim
    if packed:
        fused = attention.in_proj_weight
        weights = [_own_parameter(weight, like=fused) for weight in fused.chunk(3)]
    else:
        weights = [getattr(attention, f"{part}_proj_weight") for part in _PARTS]
    bias = attention.in_proj_bias
    biases = [None] * 3 if bias is None else [_own_parameter(part, like=bias) for part in bias.chunk(3)]
    for name in ("in_proj_weight", "in_proj_bias", *(f"{part}_proj_weight" for part in _PARTS)):
        attention._parameters.pop(name, None)
    attention.__dict__.pop("_qkv_same_embed_dim", None)
    attention.__dict__["_plain_class"] = type(attention)
    attention.__class__ = SplitMultiheadAttention
    attention._was_packed = packed
    for part, weight, part_bias in zip(_PARTS, weights, biases, strict=True):
        attention.register_parameter(f"{part}_proj_weight", weight)
        attention.register_parameter(f"{part}_proj_bias", part_bias)
    attention.register_state_dict_post_hook(_join_multihead_keys)
    attention.register_load_state_dict_pre_hook(_split_multihead_keys)


def join_multihead(attention: SplitMultiheadAttention) -> None:
    """Undo `split_multihead()` in place; a packed tensor requires gradients if any of its parts does."""
    names = [f"{part}_proj_{kind}" for kind in ("weight", "bias") for part in _PARTS]
    own = {name: attention._parameters.pop(name) for name in names}
    rest = dict(attention._parameters)
    attention._parameters.clear()
    weights = [own[f"{part}_proj_weight"] for part in _PARTS]
    biases = [own[f"{part}_proj_bias"] for part in _PARTS]
    packed = bool(attention._was_packed)
    attention.__class__ = attention.__dict__.pop("_plain_class")
    del attention._was_packed
    attention.__dict__["_qkv_same_embed_dim"] = packed
    attention.register_parameter("in_proj_weight", _joined(weights) if packed else None)
    for part, weight in zip(_PARTS, weights, strict=True):
        attention.register_parameter(f"{part}_proj_weight", None if packed else weight)
    attention.register_parameter("in_proj_bias", _joined(biases))
    attention._parameters.update(rest)


def _joined(parts: Sequence[nn.Parameter | None]) -> nn.Parameter | None:
    own = [part for part in parts if part is not None]
    if not own:
        return None
    joined = torch.cat([p.detach() for p in own])
    return nn.Parameter(joined, requires_grad=any(p.requires_grad for p in own))


def _join_multihead_keys(module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for kind in ("weight", "bias"):
        if kind == "weight" and not module._was_packed:
            continue
        names = [f"{prefix}{part}_proj_{kind}" for part in _PARTS]
        if all(name in state for name in names):
            state[f"{prefix}in_proj_{kind}"] = torch.cat([state.pop(name) for name in names])


def _split_multihead_keys(_module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for kind in ("weight", "bias"):
        fused = state.pop(f"{prefix}in_proj_{kind}", None)
        if fused is not None:
            for part, tensor in zip(_PARTS, fused.chunk(3), strict=True):
                state[f"{prefix}{part}_proj_{kind}"] = tensor
