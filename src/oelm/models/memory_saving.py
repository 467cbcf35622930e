"""Two operations of the GPT that keep less and write less than plain autograd does, on CPUs.

Numbers are the same; only what is kept between the forward and the backward pass differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def saves_memory(x: Tensor) -> bool:
    """Whether these operations serve: eager CPU code in one type. Elsewhere the plain ones are better."""
    kind = x.device.type
    return kind == "cpu" and not torch.is_autocast_enabled(kind) and not torch.compiler.is_compiling()


def gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """layer(gelu(x)), keeping x alone: the activation, the widest tensor of a block, is computed again."""
    return _GeluLinear.apply(x, layer.weight, layer.bias)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (g,) = upstream
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = g.reshape(-1, g.shape[-1])
        grad_weight = flat.T @ F.gelu(x).flatten(0, -2) if wants_weight else None
        grad_bias = flat.sum(0) if wants_bias else None
        grad_x = torch.ops.aten.gelu_backward(g @ weight, x) if wants_x else None
        return grad_x, grad_weight, grad_bias


@dataclass
class Tie:
    """Carries the head's share of a tied weight's gradient to where the embedding's share is known."""

    gradient: Tensor | None = None


def tied_embedding(ids: Tensor, weight: Tensor, tie: Tie) -> Tensor:
    """weight[ids]; its backward pass adds the few rows it knows to the head's gradient of the same weight.

    Plain autograd makes a second full-size gradient, almost all zeros, and adds the two.
    """
    return _TiedEmbedding.apply(ids, weight, tie)


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, tie: Tie) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tie, ctx.shape = tie, weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        (g,) = upstream
        gradient = ctx.tie.gradient
        if gradient is None:
            gradient = g.new_zeros(ctx.shape)
        ctx.tie.gradient = None
        return None, gradient.index_add_(0, ids.flatten(), g.reshape(-1, g.shape[-1])), None
