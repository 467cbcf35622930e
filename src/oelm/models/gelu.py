"""GELU and the linear layer after it, as in the MLP of a GPT."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.models import compiled

# Elements of x from which gelu(x) is recomputed in the backward pass instead of stored. Below 8 MB per layer,
# the memory is not worth the time.
RECOMPUTED = 2**21


def gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return layer(gelu(x))."""
    if compiled.on_plain_cpu(x) and x.numel() >= RECOMPUTED:
        return recomputed_gelu_linear(x, layer)
    return layer(compiled.gelu(x) if compiled.runs_gelu(x) else F.gelu(x))


def recomputed_gelu_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return layer(gelu(x)). The backward pass recomputes gelu(x), so that it need not be stored."""
    return _Recomputed.apply(x, layer.weight, layer.bias)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(F.gelu(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (g,) = upstream
        _, needs_weight, needs_bias = ctx.needs_input_grad
        grad_y = g @ weight
        if compiled.runs_gelu(x) and not torch.is_grad_enabled():
            y, grad_x = compiled.gelu_and_gradient(x, grad_y)
        else:
            y, grad_x = F.gelu(x), torch.ops.aten.gelu_backward(grad_y, x)
        flat = g.reshape(-1, g.shape[-1])
        grad_weight = flat.T @ y.flatten(0, -2) if needs_weight else None
        grad_bias = flat.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias
