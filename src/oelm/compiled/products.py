"""Matrix products by our own C++ code (products.cpp), on CPUs on which torch's products are slow.

On AMD CPUs from Zen 5 on, they take about half the time of torch's products. On other CPUs, and for small or
thin matrices, torch computes them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm import compiled

# A product with fewer rows, columns or summands is left to torch: it would spend its time on copies.
SMALLEST = 16
# With fewer rows of a, the copy of b takes a notable part of the time.
FEWEST_ROWS = 48


@functools.cache
def available() -> bool:
    """Return whether there is a compiled library whose products are faster than torch's on this CPU."""
    found = compiled.library()
    return found is not None and bool(found.oelm_runs_products())


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return a @ b for matrices without gradients.

    out: the result is stored in it; its rows must be contiguous. With `add`, it is added to what `out` holds
    """
    if out is None:
        assert not add
        if not _faster(a, b):
            return a @ b
        out = a.new_empty(a.shape[0], b.shape[1])
    elif out.dtype != a.dtype:
        result = (a @ b).to(out.dtype)
        return out.add_(result) if add else out.copy_(result)
    elif not _faster(a, b) or out.stride(1) != 1:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    _compute(a, b, out, None, add)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, as torch.nn.functional.linear."""
    if x.dim() > 1 and _runs_linear(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether layer(x) computes `linear()` and nothing else: an nn.Linear without hooks."""
    return type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def call(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x), computed by `linear()` if the layer is a plain nn.Linear."""
    return linear(x, layer.weight, layer.bias) if is_plain_linear(layer) else layer(x)


def speed_up_linear_layers(model: nn.Module) -> None:
    """Let every nn.Linear of `model` use `linear()`, also within models of other libraries."""
    if available():
        for layer in model.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer):
                layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:  # the name of the argument is that of nn.Linear
    return linear(input, layer.weight, layer.bias)


def linear_gradients(
    g: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias in `linear()` for the gradient g of its result.

    needs: which of the three are needed; the others are None
    """
    needs_x, needs_weight, needs_bias = needs
    rows = g.reshape(-1, len(weight))
    multiply = torch.mm if torch.is_grad_enabled() else product  # for second derivatives
    return (
        multiply(rows, weight).view(x.shape) if needs_x else None,
        multiply(rows.T, x.reshape(-1, x.shape[-1])) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


def _runs_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if not available():
        return False
    given = (x, weight) if bias is None else (x, weight, bias)
    rows = x.numel() // max(1, x.shape[-1])
    fits = rows >= FEWEST_ROWS and min(weight.shape) >= SMALLEST and x.shape[-1] == weight.shape[1]
    return fits and compiled.runs(*given)


def _faster(a: Tensor, b: Tensor) -> bool:
    """Return whether to compute a @ b with `_compute()`."""
    if not available() or a.shape[0] < FEWEST_ROWS or a.shape[1] != b.shape[0]:
        return False
    return min(*a.shape, b.shape[1]) >= SMALLEST and compiled.runs(a, b)


def _compute(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, add: bool) -> None:
    """Store a @ b + bias in `out`; with `add`, add a @ b to `out`."""
    found = compiled.library()
    assert found is not None
    fields = (  # of the struct Product
        *(out.data_ptr(), out.stride(0), a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride()),
        *(0 if bias is None else bias.data_ptr(), a.shape[0], b.shape[1], a.shape[1], int(add)),
    )
    found.oelm_product((ctypes.c_int64 * len(fields))(*fields), ctypes.c_int64(torch.get_num_threads()))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        y = x.new_empty(len(flat), len(weight))
        _compute(flat, weight.T, y, None if bias is None else bias.contiguous(), False)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return linear_gradients(upstream[0], x, weight, ctx.needs_input_grad)
