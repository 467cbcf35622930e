"""Small trainable parts on a projection, frozen or not: residue, core, temperature, convolution.

They compose in that order on y = W x and start as the identity, so a fresh one computes exactly what the
plain projection does. The projection's own weight and bias keep their names (and so their keys in a file).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.autograd.function import once_differentiable

from oelm.errors import OelmError
from oelm.methods.method import Method
from oelm.methods.orthogonal import gaussian, stream

#: Parameters that start at one, not at zero: decay would pull them away from "no change".
IDENTITY_STARTS = ("conv", "core", "temperature")
EXTRAS = ("lowrank_a", "lowrank_b", *IDENTITY_STARTS)


class ExtendedProjection(nn.Module):
    """A query, key or value projection with the extras of a method, in place of the layer it was made from.

    The core and the temperature act on the query alone: q' C k has one C, and a second would be redundant.
    """

    bias: nn.Parameter | None
    lowrank_a: nn.Parameter | None  # (rank, d_in)
    lowrank_b: nn.Parameter | None  # (rows, rank)
    core: nn.Parameter | None  # (H, hs, hs)
    temperature: nn.Parameter | None  # (H,)
    conv: nn.Parameter | None  # (taps, rows), tap 0 is the present token

    def __init__(
        self, base: nn.Module, role: str, num_heads: int, head_dim: int, transposed: bool, method: Method
    ) -> None:
        super().__init__()
        self.transposed, self.num_heads, self.head_dim = transposed, num_heads, head_dim
        weight, bias = base.weight, base.bias
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)
        rows, d_in = weight.shape[::-1] if transposed else weight.shape
        self.in_features, self.out_features = d_in, rows
        self.lowrank_scale = method.lowrank_scale
        rank, query = method.lowrank, role == "q"
        self._add("lowrank_a", (rank, d_in) if rank else None)
        self._add("lowrank_b", (rows, rank) if rank else None)
        self._add("core", (num_heads, head_dim, head_dim) if method.core and query else None)
        self._add("temperature", (num_heads,) if method.temperature and query else None)
        self._add("conv", (method.conv, rows) if method.conv else None)
        self.real_tokens: Tensor | None = None  # (B, T), False for padding; set while an attention works
        self.train(base.training)

    def _add(self, name: str, shape: tuple[int, ...] | None) -> None:
        self.register_parameter(name, None if shape is None else nn.Parameter(self.weight.new_zeros(shape)))

    @torch.no_grad()
    def start(self, seed: int, name: str) -> None:
        """Set every extra to the identity: B = 0, C = 1, temperature 1, and a convolution of the present."""
        if self.lowrank_a is not None:
            drawn = gaussian(self.lowrank_a.shape, stream(seed, f"{name}.lowrank_a"), self.in_features**-0.5)
            self.lowrank_a.copy_(drawn)
        if self.core is not None:
            self.core.copy_(torch.eye(self.head_dim))
        if self.temperature is not None:
            self.temperature.fill_(1.0)
        if self.conv is not None:
            self.conv[0] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight  # (rows, d_in)
        if self.lowrank_a is None or self.lowrank_b is None:
            y = F.linear(x, weight, self.bias)  # (B, T, rows)
        else:
            y = residue_linear(x, weight, self.bias, self.lowrank_a, self.lowrank_b, self.lowrank_scale)
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

    @property
    def whole(self) -> bool:
        """Whether its residue takes the whole weight gradient."""
        a, b = self.lowrank_a, self.lowrank_b
        return a is not None and b is not None and not residue_is_thin(a, b)

    def extra_repr(self) -> str:
        extras = [name for name in EXTRAS if getattr(self, name) is not None]
        return f"in_features={self.in_features}, out_features={self.out_features}, extras={extras}"


def residue_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """(W + s B A) x + bias at the cost of W x: the sum is made once per call, not per token.

    Backwards, x's gradient takes one product; A's and B's take thin ones, and W's none while it is frozen.
    Where the rank is no small part of the width, they follow from the whole product that W's would take. A
    few tokens (as in decoding) are not worth the sum.
    """
    few = x.numel() // x.shape[-1] * sum(weight.shape) < weight.numel()
    if few or not is_autocast_available(x.device.type):
        return F.linear(x, weight, bias) + F.linear(F.linear(x, a) * scale, b)
    if not residue_is_thin(a, b):
        with torch.autocast(x.device.type, enabled=False):
            merged = torch.addmm(weight, b, a, alpha=scale)
        return F.linear(x, merged, bias)
    dtype = weight.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
    return _ResidueLinear.apply(x, weight, bias, a, b, scale, dtype)


def residue_is_thin(a: Tensor, b: Tensor) -> bool:
    """Whether products of rank width take less time than a whole one, which runs at about eight times their
    rate on a CPU, and of which there are four."""
    return 32 * len(a) <= min(a.shape[1], b.shape[0])


class _ResidueLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            ctx.save_for_backward(x, weight, a, b)
            ctx.scale = scale
            merged = torch.addmm(weight, b, a, alpha=scale).to(dtype)
            return F.linear(x, merged, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        flat, grad_flat = x.flatten(0, -2), grad.flatten(0, -2)  # (N, d_in), (N, rows)
        # Thin products with the rank first: the other way round they take up to ten times as long on a CPU.
        # The first of A's runs best with its rows in eights.
        eights = F.pad(b * ctx.scale, (0, -len(a) % 8)).to(x.dtype).mT
        grad_a = (eights @ grad_flat.mT @ flat)[: len(a)]
        grad_b = ((a * ctx.scale).to(x.dtype) @ flat.mT @ grad_flat).mT
        grad_x = None
        if needs_x:  # the sum again: cheaper than a matrix kept for every projection until now
            grad_x = grad @ torch.addmm(weight, b, a, alpha=ctx.scale).to(x.dtype)
        return (
            grad_x,
            (grad_flat.mT @ flat).to(a.dtype) if needs_weight else None,
            grad_flat.sum(0).to(a.dtype) if needs_bias else None,
            grad_a.to(a.dtype),
            grad_b.to(b.dtype),
            None,
            None,
        )


def causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """y[b, t, c] = sum_i taps[i, c] x[b, t - i, c]: a depthwise convolution that sees no future token.

    Shift and add on the (B, T, rows) layout the projection already has: no transposes, no padded copy.
    F.conv1d(groups=rows) takes several times as long on a CPU, forward and backward.
    """
    if x.dim() != 3:
        raise OelmError(
            f"the convolution needs (batch, time, width), got {tuple(x.shape)}: "
            f"this model packs sequences without padding, which would mix neighbours in the batch"
        )
    return _CausalConv.apply(x, taps.to(x.dtype))


_PIECE = 2**20  # numbers of x whose products are summed at a time: 4 MB in fp32


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        y = x * taps[0]
        for i in range(1, min(len(taps), x.shape[1])):
            y[:, i:].addcmul_(x[:, :-i], taps[i])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, taps = ctx.saved_tensors
        _, T, rows = x.shape
        shifts = range(1, min(len(taps), T))
        grad_x = grad * taps[0]
        for i in shifts:
            grad_x[:, :-i].addcmul_(grad[:, i:], taps[i])
        grad_taps = torch.zeros_like(taps)
        some = max(1, _PIECE // max(1, T * rows))
        for x_, g_ in zip(x.split(some), grad.split(some), strict=True):
            grad_taps[0] += (g_ * x_).sum((0, 1))
            for i in shifts:
                grad_taps[i] += (g_[:, i:] * x_[:, :-i]).sum((0, 1))
        return grad_x, grad_taps
