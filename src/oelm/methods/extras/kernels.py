"""Fast implementations of the low-rank linear layer and the causal convolution, the two costly extras."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp import is_autocast_available

from oelm import compiled
from oelm.compiled.products import compute_linear, product
from oelm.errors import OelmError

_CHUNK = 2**20  # elements of x per partial sum in the convolution's backward pass, 4 MB in fp32


def _refuse_second_derivatives() -> None:
    """Raise an error in a backward pass with create_graph=True.

    `once_differentiable` is not enough: torch.autograd.grad() may silently leave out its part of the result.
    """
    if torch.is_grad_enabled():
        raise OelmError(
            "second derivatives of low-rank adapters with a small rank and of convolutions are not "
            "supported: use a method without them"
        )


def lowrank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """Return (W + scale B A) x + bias at about the cost of W x, by computing W + scale B A once per call.

    If the rank is small (see `rank_is_small()`), the gradients of A and B are computed without the gradient
    of W + scale B A, which is as large as W. A frozen W gets no gradient. With few tokens, as in decoding,
    computing W + scale B A would be the largest cost, so W x and B A x are computed separately.
    """
    device = x.device.type
    few_tokens = x.numel() // x.shape[-1] * sum(weight.shape) < weight.numel()
    if few_tokens or not is_autocast_available(device):
        return F.linear(x, weight, bias) + F.linear(F.linear(x, a) * scale, b)
    if not torch.is_autocast_enabled(device):
        if not rank_is_small(a, b) and compiled.must_use_torch():
            return F.linear(x, torch.addmm(weight, b, a, alpha=scale), bias)
        return _LowRankLinear.apply(x, weight, bias, a, b, scale)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        if rank_is_small(a, b):
            return _LowRankLinear.apply(x.to(dtype), weight, bias, a, b, scale)
        merged = torch.addmm(weight, b, a, alpha=scale)
    return F.linear(x, merged, bias)


def rank_is_small(a: Tensor, b: Tensor) -> bool:
    """Return whether four thin matrix products give the gradients of A and B faster than one full product.

    The full product is the gradient of the merged weight W + s B A. A thin product has only `rank` rows. On a
    CPU, a full product reaches up to four times the FLOP/s of a thin one, hence the factor 4 x 4 = 16.
    """
    return 16 * len(a) <= min(a.shape[1], b.shape[0])


class _LowRankLinear(torch.autograd.Function):
    """At width 128, each operation takes a noticeable time, so dtypes are converted only under autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., d_in), in the dtype of autocast if that is enabled
        weight: Tensor,  # (rows, d_in)
        bias: Tensor | None,  # (rows,)
        a: Tensor,  # (rank, d_in)
        b: Tensor,  # (rows, rank)
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        merged = torch.addmm(weight, b, a, alpha=scale)
        if x.dtype != weight.dtype:
            merged, bias = merged.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return compute_linear(x, merged, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        small = rank_is_small(a, b)
        if small:
            _refuse_second_derivatives()
        multiply = torch.mm if torch.is_grad_enabled() else product  # for second derivatives
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        flat, grad_flat = x.flatten(0, -2), grad.flatten(0, -2)  # (N, d_in), (N, rows)
        # Computing W + s B A again is cheaper than keeping it in memory for every projection.
        merged = torch.addmm(weight, b, a, alpha=ctx.scale) if needs_x else weight
        if x.dtype != weight.dtype:
            merged, a, b = merged.to(x.dtype), a.to(x.dtype), b.to(x.dtype)
        full = multiply(grad_flat.mT, flat) if needs_weight or not small else None  # (rows, d_in)
        a, b = a * ctx.scale, b.mT * ctx.scale  # (rank, d_in), (rank, rows)
        if small:
            # The rank is the first dimension of each product: the transposed products are up to ten times
            # slower on a CPU. A contiguous copy of B^T makes the first product faster still.
            grad_a, grad_b = b.contiguous() @ grad_flat.mT @ flat, a @ flat.mT @ grad_flat
        else:
            assert full is not None
            grad_a, grad_b = b @ full, a @ full.mT
        return (  # autograd converts each gradient to the dtype of its tensor
            multiply(grad_flat, merged).view(x.shape) if needs_x else None,
            full if needs_weight else None,
            grad_flat.sum(0) if needs_bias else None,
            grad_a,
            grad_b.mT,
            None,
        )


def causal_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Return the causal depthwise convolution y[b, t, c] = sum_i taps[i, c] x[b, t - i, c].

    x has the shape (batch, time, channels), taps (number of taps, channels). Shifted copies of x are added in
    this layout, without transposes and padding. F.conv1d(groups=channels) is several times slower on a CPU.
    """
    if x.dim() != 3:
        raise OelmError(
            f"the method's convolution needs an input of shape (batch, time, width), got {tuple(x.shape)}. "
            f"This model packs sequences without padding, so the convolution would mix different sequences: "
            f"use a method without convolution"
        )
    return _CausalConv.apply(x, taps.to(x.dtype))


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        y = x * taps[0]
        for i in range(1, min(len(taps), x.shape[1])):
            y[:, i:].addcmul_(x[:, :-i], taps[i])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _refuse_second_derivatives()
        x, taps = ctx.saved_tensors  # (B, T, rows), (taps, rows)
        _, T, rows = x.shape
        shifts = range(1, min(len(taps), T))
        grad_x = grad * taps[0]
        for i in shifts:
            grad_x[:, :-i].addcmul_(grad[:, i:], taps[i])
        grad_taps = torch.zeros_like(taps)
        batch = max(1, _CHUNK // max(1, T * rows))  # sequences per chunk
        for x_, g_ in zip(x.split(batch), grad.split(batch), strict=True):
            grad_taps[0] += (g_ * x_).sum((0, 1))
            for i in shifts:
                grad_taps[i] += (g_[:, i:] * x_[:, :-i]).sum((0, 1))
        return grad_x, grad_taps
