"""Causal attention and GELU by our own C++ code (kernels.cpp): faster than torch for small models on a CPU.

They are used in processes with one thread: `oelm run` and `oelm decide` train one run per core. The
installation compiles them if there is a C++ compiler. Otherwise, and on x86 CPUs without AVX2, torch computes
them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oelm.models.causal_attention import must_use_torch, refuse_second_derivatives
from oelm.models.memory_saving import saves_memory

HEAD_SIZES = (8, 16, 32, 64)  # one_head() in kernels.cpp has these
MAX_TOKENS = 256  # with more tokens per row, the data of a head no longer fits into the cache


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if there is none, or if this CPU cannot run it."""
    spec = importlib.util.find_spec("oelm.models._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        return found if found.oelm_runs_here() else None
    except (OSError, AttributeError):  # compiled for another system, or from an older kernels.cpp
        return None


def runs_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether to compute causal attention for q, k, v (B, T, nh, hs) with `attention()`."""
    fits = q.shape == k.shape == v.shape and q.shape[1] <= MAX_TOKENS and q.shape[3] in HEAD_SIZES
    return fits and _runs(q, k, v)


def runs_gelu(x: Tensor) -> bool:
    """Return whether to compute the GELU of x with `gelu()`."""
    return _runs(x)


def _runs(*tensors: Tensor) -> bool:
    """Return whether the C++ code can be used for `tensors`, and is faster than torch."""
    # The C++ code reads the memory of plain tensors. Others are left to torch.
    plain = all(type(x) is Tensor and x.dtype == torch.float32 and saves_memory(x) for x in tensors)
    return plain and torch.get_num_threads() == 1 and not must_use_torch() and library() is not None


def attention(q: Tensor, k: Tensor, v: Tensor, rotation: Tensor | None) -> Tensor:
    """Return the outputs (B, T, nh, hs) of causal attention for q, k, v (B, T, nh, hs).

    rotation: table (T, 3, d) of `rotary_table()` by which q and k are rotated first; None = no rotation
    """
    table = rotation.to(q.dtype).contiguous() if rotation is not None else None
    return _Attention.apply(q.contiguous(), k.contiguous(), v.contiguous(), table)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rotation: Tensor | None) -> Tensor:
        rows, tokens, heads, _ = q.shape
        y, log_sum = torch.empty_like(q), q.new_empty(rows, heads, tokens)
        _call("oelm_attention_forward", q.shape, q, k, v, rotation, y, log_sum)
        ctx.save_for_backward(q, k, v, rotation, y, log_sum)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        refuse_second_derivatives()
        q, k, v, rotation, y, log_sum = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        given = (q, k, v, rotation, y, log_sum, upstream[0].contiguous())
        _call("oelm_attention_backward", q.shape, *given, *grads)
        return *grads, None


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU of x."""
    return _Gelu.apply(x.contiguous())


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, derivative = torch.empty_like(x), torch.empty_like(x)
        _call("oelm_gelu", (x.numel(),), x, y, derivative)
        ctx.save_for_backward(derivative)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        refuse_second_derivatives()
        (derivative,) = ctx.saved_tensors
        return upstream[0] * derivative


def _call(function: str, sizes: Sequence[int], *tensors: Tensor | None) -> None:
    """Call a function of kernels.cpp with the addresses of the `tensors`."""
    found = library()
    assert found is not None
    addresses = [t.data_ptr() if t is not None else None for t in tensors]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)  # the struct Forward, Backward or Gelu
    getattr(found, function)(pointers, (ctypes.c_int64 * len(sizes))(*sizes))  # sizes: the struct Shape
