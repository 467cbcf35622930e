"""Two operations that store fewer tensors between the forward and the backward pass than plain autograd.

Their values are the same as those of plain PyTorch. They are used in eager mode on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def saves_memory(x: Tensor) -> bool:
    """Return whether to use the operations of this module for x.

    That is the case on a CPU without autocast and torch.compile.
    """
    kind = x.device.type
    return kind == "cpu" and not torch.is_autocast_enabled(kind) and not torch.compiler.is_compiling()


def gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return layer(gelu(x)). The backward pass recomputes gelu(x), so that it need not be stored."""
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
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat = g.reshape(-1, g.shape[-1])
        grad_weight = flat.T @ F.gelu(x).flatten(0, -2) if needs_weight else None
        grad_bias = flat.sum(0) if needs_bias else None
        grad_x = torch.ops.aten.gelu_backward(g @ weight, x) if needs_x else None
        return grad_x, grad_weight, grad_bias


@dataclass
class TiedGradient:
    """The gradient of the weight that LM head and embedding share.

    The backward pass of the LM head stores its part here; that of the embedding then adds its own part.
    """

    gradient: Tensor | None = None


def tied_embedding(ids: Tensor, weight: Tensor, tied: TiedGradient) -> Tensor:
    """Return weight[ids]; the backward pass adds its gradient to that of the LM head, which is in `tied`.

    Plain autograd would allocate a second gradient of the size of the weight, with zeros in most rows.
    """
    return _TiedEmbedding.apply(ids, weight, tied)


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, tied: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tied, ctx.shape = tied, weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        (g,) = upstream
        gradient = ctx.tied.gradient
        if gradient is None:
            gradient = g.new_zeros(ctx.shape)
        ctx.tied.gradient = None
        return None, gradient.index_add_(0, ids.flatten(), g.reshape(-1, g.shape[-1])), None
