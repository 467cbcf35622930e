"""GELU and the linear layer after it, as in the MLP of a GPT."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm import compiled
from oelm.compiled import products

# Elements of x from which gelu(x) is recomputed in the backward pass instead of stored. Below 8 MB per layer,
# the memory is not worth the time.
RECOMPUTED = 2**21


def gelu_linear(x: Tensor, layer: nn.Module) -> Tensor:
    """Return layer(gelu(x))."""
    if products.is_plain_linear(layer):
        if compiled.on_plain_cpu(x) and x.numel() >= RECOMPUTED:
            return recomputed_gelu_linear(x, layer)
        if compiled.runs(x, *layer.parameters()):
            return _Stored.apply(x, layer.weight, layer.bias)
    return layer(F.gelu(x))


def recomputed_gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return layer(gelu(x)). The backward pass recomputes gelu(x), so that it need not be stored."""
    return _Recomputed.apply(x, layer.weight, layer.bias)


class _Stored(torch.autograd.Function):
    """Stores gelu(x) and its derivative, which cost less together than one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, derivative = compiled.gelu_and_derivative(x)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        kept = (y if needs_weight else None, *((derivative, weight) if needs_x else (None, None)))
        ctx.save_for_backward(*kept)
        return products.compute_linear(y, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        compiled.refuse_second_derivatives()
        y, derivative, weight = ctx.saved_tensors
        grad_y, *others = products.linear_gradients(upstream[0], y, weight, ctx.needs_input_grad)
        return None if grad_y is None else grad_y.mul_(derivative), others[0], others[1]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return products.compute_linear(F.gelu(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (g,) = upstream
        _, needs_weight, needs_bias = ctx.needs_input_grad
        grad_y, _, grad_bias = products.linear_gradients(g, x, weight, (True, False, needs_bias))
        assert grad_y is not None
        if compiled.runs_gelu(x) and not torch.is_grad_enabled():
            y, grad_x = compiled.gelu_and_gradient(x, grad_y)
        else:
            y, grad_x = F.gelu(x), torch.ops.aten.gelu_backward(grad_y, x)
        _, grad_weight, _ = products.linear_gradients(g, y, weight, (False, needs_weight, False))
        return grad_x, grad_weight, grad_bias
