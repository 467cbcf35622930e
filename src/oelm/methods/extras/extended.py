"""A projection with the trainable extras of a method: adapter and bias, core, temperature, convolution.

The extras act in this order on y = W x; `oelm.Method` describes them. They are initialised so that they
change nothing: at first, the extended projection computes exactly what the plain one does. Weight and bias
keep their names, and so their keys in a state dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from oelm.compiled.products import linear
from oelm.errors import OelmError
from oelm.methods.extras.kernels import causal_conv, lowrank_linear, rank_is_small
from oelm.methods.method import Method
from oelm.methods.orthogonal import gaussian, generator_for

#: Extras that multiply, and so are initialised to the identity (the others are added, and initialised to 0).
#: Weight decay would pull them from the identity towards 0, so they get none.
IDENTITY_INIT = ("conv", "core", "temperature")
EXTRAS = ("lowrank_a", "lowrank_b", "extra_bias", *IDENTITY_INIT)
_MASK = "attention_mask"


class ExtendedProjection(nn.Module):
    """A query, key or value projection with the trainable extras of a method; it replaces the plain module.

    Core and temperature act on the queries only: in the score q' C k, a second matrix on the keys would be
    redundant. Letters in shapes: H = heads, hs = head size, rows = H hs.
    """

    bias: nn.Parameter | None  # the bias of the plain projection
    lowrank_a: nn.Parameter | None  # (rank, d_in)
    lowrank_b: nn.Parameter | None  # (rows, rank)
    extra_bias: nn.Parameter | None  # (rows,)
    core: nn.Parameter | None  # (H, hs, hs)
    temperature: nn.Parameter | None  # (H,)
    conv: nn.Parameter | None  # (taps, rows); tap 0 is the current token

    def __init__(
        self,
        base: nn.Module,
        role: str,
        num_heads: int,
        head_dim: int,
        transposed: bool,
        method: Method,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.transposed, self.num_heads, self.head_dim = transposed, num_heads, head_dim
        weight, bias = base.weight, base.bias
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)
        rows, d_in = weight.shape[::-1] if transposed else weight.shape
        self.in_features, self.out_features = d_in, rows
        self.lowrank_scale, self.bias_scale = method.lowrank_scale, method.bias_scale
        rank, query = method.rank_in(layer), role == "q"
        self._add("lowrank_a", (rank, d_in) if rank else None)
        self._add("lowrank_b", (rows, rank) if rank else None)
        self._add("extra_bias", (rows,) if method.bias else None)
        self._add("core", (num_heads, head_dim, head_dim) if method.core and query else None)
        self._add("temperature", (num_heads,) if method.temperature and query else None)
        self._add("conv", (method.conv, rows) if method.conv else None)
        self.real_tokens: Tensor | None = None  # (B, T), False for padding; set during a forward pass
        self.train(base.training)

    def _add(self, name: str, shape: tuple[int, ...] | None) -> None:
        self.register_parameter(name, None if shape is None else nn.Parameter(self.weight.new_zeros(shape)))

    @torch.no_grad()
    def init_extras(self, seed: int, name: str) -> None:
        """Initialise the extras so that the projection computes the same as without them.

        The adapter's B, the bias and all taps except tap 0 are 0; core, temperature and tap 0 are the
        identity. The adapter's A is random, seeded with `seed` and `name`, the name of the projection.
        """
        if self.lowrank_a is not None:
            generator = generator_for(seed, f"{name}.lowrank_a")
            self.lowrank_a.copy_(gaussian(self.lowrank_a.shape, generator, self.in_features**-0.5))
        if self.core is not None:
            self.core.copy_(torch.eye(self.head_dim))
        if self.temperature is not None:
            self.temperature.fill_(1.0)
        if self.conv is not None:
            self.conv[0] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight  # (rows, d_in)
        bias = self.total_bias()
        if self.lowrank_a is None or self.lowrank_b is None:
            y = linear(x, weight, bias)  # (B, T, rows)
        else:
            y = lowrank_linear(x, weight, bias, self.lowrank_a, self.lowrank_b, self.lowrank_scale)
        if self.core is not None:
            heads = y.unflatten(-1, (self.num_heads, self.head_dim))  # (B, T, H, hs)
            y = torch.einsum("...hi,hij->...hj", heads, self.core).flatten(-2)
        if self.temperature is not None:
            y = (y.unflatten(-1, (self.num_heads, self.head_dim)) * self.temperature[:, None]).flatten(-2)
        if self.conv is not None:
            if self.real_tokens is not None and self.real_tokens.shape[1] == y.shape[1]:
                y = y.masked_fill(~self.real_tokens[..., None], 0.0)
            y = causal_conv(y, self.conv)
        return y

    def total_bias(self) -> Tensor | None:
        """Return bias + bias_scale * extra_bias, without a term that is None; None if both are None."""
        if self.extra_bias is None:
            return self.bias
        extra = self.extra_bias * self.bias_scale
        return extra if self.bias is None else self.bias + extra

    @property
    def needs_full_weight_gradient(self) -> bool:
        """Whether the adapter's rank is so large that training it computes the full weight gradient."""
        a, b = self.lowrank_a, self.lowrank_b
        return a is not None and b is not None and not rank_is_small(a, b)

    def extra_repr(self) -> str:
        extras = [name for name in EXTRAS if getattr(self, name) is not None]
        return f"in_features={self.in_features}, out_features={self.out_features}, extras={extras}"


def mask_padding_in_conv(attention: nn.Module) -> None:
    """Keep padding tokens out of the convolutions of an attention module that accepts an attention mask.

    The projections inside the attention module do not get the mask as an argument. So hooks store it in the
    projections before each forward pass of the attention module, and clear it afterwards. No mask remains for
    the next batch, and a recomputation by activation checkpointing uses the mask of its own batch.
    """
    if _MASK in _argument_names(type(attention).forward):
        attention.register_forward_pre_hook(_set_mask, with_kwargs=True)
        attention.register_forward_hook(_clear_mask, always_call=True)


def _set_mask(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = dict(zip(_argument_names(type(attention).forward), args, strict=False)) | kwargs
    if packs_sequences(given.get("position_ids"), real_tokens(given.get(_MASK))):
        raise OelmError(
            "the position ids of a row start again in its middle: it packs several sequences, and the "
            "method's convolution would mix them. Use one sequence per row, or a method without convolution"
        )
    _set_real_tokens(attention, real_tokens(given.get(_MASK)))


def _clear_mask(attention: nn.Module, *_: Any) -> None:
    _set_real_tokens(attention, None)


def _set_real_tokens(attention: nn.Module, real: Tensor | None) -> None:
    for module in attention.modules():
        if isinstance(module, ExtendedProjection):
            module.real_tokens = real


@cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # without self


def packs_sequences(position_ids: Any, real: Tensor | None) -> bool:
    """Return whether the position ids (B, T) of a row fall from one real token to the next."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        return False
    restarts = position_ids[:, 1:] < position_ids[:, :-1]
    if real is not None and real.shape == position_ids.shape:
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return bool(restarts.any())


def real_tokens(mask: Any) -> Tensor | None:
    """Return a bool tensor (B, T), False for padding tokens, from an attention mask; None if unknown.

    The mask has the shape (B, T) or (B, 1, T, T). For the second shape, the diagonal is used: a token that is
    not padding attends to itself, and padding is masked everywhere.
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        return mask != 0
    if mask.dim() != 4 or mask.shape[-1] != mask.shape[-2]:
        return None
    diagonal = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    if diagonal.is_floating_point():
        return diagonal > torch.finfo(diagonal.dtype).min / 2
    return diagonal != 0
