"""Matrix products by our own C++ code (products.cpp), on CPUs on which torch's products are slow.

These are AMD CPUs from Zen 5 on (docs/decisions/0012-compiled-products.md). On other CPUs, and for small or
thin matrices, torch computes the products.
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
from torch.nn.modules.module import _has_any_global_hook

from oelm import compiled

# Smaller products are left to torch, because copying the matrices would take most of the time.
SMALLEST = 16
# With fewer rows of a, the copy of b takes a notable part of the time.
FEWEST_ROWS = 48


@functools.cache
def available() -> bool:
    """Return whether there is a compiled library whose products are faster than torch's on this CPU."""
    found = compiled.library()
    return found is not None and bool(found.oelm_runs_products()) and torch.backends.mkl.is_available()


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return a @ b for matrices. Call it only where autograd records nothing.

    out: the result is stored in it. With `add`, the result is added to what `out` holds.
    """
    if out is None:
        assert not add
        if not _use_compiled(a, b):
            return a @ b
        out = a.new_empty(a.shape[0], b.shape[1])
    elif out.dtype != a.dtype:
        result = (a @ b).to(out.dtype)
        return out.add_(result) if add else out.copy_(result)
    elif not (_use_compiled(a, b, out) and out.shape == (len(a), b.shape[1]) and out.stride(1) == 1):
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    _compute(a, b, out, None, add)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, as torch.nn.functional.linear."""
    if _use_compiled_linear(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def compute_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `linear()` without recording gradients, for use in the forward pass of an autograd function."""
    if _use_compiled_linear(x, weight, bias):
        return _compute_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether layer(x) computes `linear()` and nothing else: an nn.Linear without hooks."""
    if type(layer) is not nn.Linear or has_hooks(layer):
        return False
    own = vars(layer).get("forward")
    return own is None or getattr(own, "__func__", None) is _forward


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks before or after its computation."""
    own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in own) or bool(_has_any_global_hook())


def call_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Return layer(x), computed by our products if the layer is a plain nn.Linear."""
    if is_plain_linear(layer) and _use_compiled_linear(x, layer.weight, layer.bias):
        return _Linear.apply(x, layer.weight, layer.bias)
    return layer(x)


def speed_up_linear_layers(model: nn.Module) -> None:
    """Let every nn.Linear of `model` use `linear()`, also within models of other libraries."""
    if available():
        for layer in model.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer):
                layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:  # the name of the argument is that of nn.Linear
    return linear(input, layer.weight, layer.bias)


_forward.__name__ = "forward"  # a bound method is pickled by this name; nn.Linear's own is read then


def linear_gradients(
    g: Tensor, x: Tensor | None, weight: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias in `linear()` for the gradient g of its result.

    x: may be None if the gradient of the weight is not needed
    weight: may be None if the gradient of x is not needed
    needs: which of the three gradients are needed; the others are None
    """
    needs_x, needs_weight, needs_bias = needs
    grad_x = grad_weight = None
    rows = g.reshape(-1, g.shape[-1])
    multiply = torch.mm if torch.is_grad_enabled() else product  # for second derivatives
    if needs_x:
        assert weight is not None
        grad_x = multiply(rows, weight).view(*g.shape[:-1], weight.shape[1])
    if needs_weight:
        assert x is not None
        grad_weight = multiply(rows.T, x.reshape(-1, x.shape[-1]))
    return grad_x, grad_weight, rows.sum(0) if needs_bias else None


def _use_compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = (x, weight) if bias is None else (x, weight, bias)
    if not _can_run(*given) or weight.dim() != 2 or x.dim() < 2:
        return False
    if x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return False  # torch adds a bias of another shape, or raises the error
    rows = x.numel() // max(1, x.shape[-1])
    return rows >= FEWEST_ROWS and min(weight.shape) >= SMALLEST


def _use_compiled(a: Tensor, b: Tensor, *out: Tensor) -> bool:
    """Return whether to compute a @ b with `_compute()`."""
    if not _can_run(a, b, *out):
        return False
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return False
    return a.shape[0] >= FEWEST_ROWS and min(*a.shape, b.shape[1]) >= SMALLEST


def _can_run(*tensors: Tensor) -> bool:
    # torch.compile cannot follow `available()`.
    return not torch.compiler.is_compiling() and available() and compiled.runs(*tensors)


def _compute(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, add: bool) -> None:
    """Store a @ b + bias in `out`; with `add`, add a @ b to `out`."""
    found = compiled.library()
    assert found is not None
    fields = (  # of the struct Product
        *(out.data_ptr(), out.stride(0), a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride()),
        *(0 if bias is None else bias.data_ptr(), a.shape[0], b.shape[1], a.shape[1], int(add)),
    )
    found.oelm_product((ctypes.c_int64 * len(fields))(*fields), ctypes.c_int64(torch.get_num_threads()))


def _compute_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias; `_use_compiled_linear()` must be true."""
    y = x.new_empty(*x.shape[:-1], len(weight))
    start = None if bias is None else bias.contiguous()
    _compute(x.reshape(-1, x.shape[-1]), weight.T, y.view(-1, len(weight)), start, False)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _compute_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return linear_gradients(upstream[0], x, weight, ctx.needs_input_grad)
