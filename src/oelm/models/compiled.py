"""Causal attention by our own C++ code (attention.cpp): faster than that of torch for small models on a CPU.

It is used in processes with one thread: `oelm run` and `oelm decide` train one run per core. The installation
compiles it if there is a C++ compiler. Otherwise, and on x86 CPUs without AVX2, torch computes it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from oelm.models.causal_attention import refuse_second_derivatives

HEAD_SIZES = (8, 16, 32, 64)  # one_head() in attention.cpp has these
MAX_TOKENS = 256  # with more tokens per row, the data of a head no longer fits into the cache


class _Shape(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "tokens", "heads", "size"))


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if there is none, or if this CPU cannot run it."""
    spec = importlib.util.find_spec("oelm.models._attention")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        return found if found.oelm_attention_runs_here() else None
    except (OSError, AttributeError):  # compiled for another system, or from an older attention.cpp
        return None


def is_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether to compute causal attention for q, k, v (B, T, nh, hs) with `attention()`."""
    # The C++ code reads the memory of plain tensors of one shape. Others are left to torch.
    plain = all(type(x) is Tensor and x.dtype == torch.float32 and x.shape == q.shape for x in (q, k, v))
    fits = plain and q.shape[1] <= MAX_TOKENS and q.shape[3] in HEAD_SIZES
    return fits and torch.get_num_threads() == 1 and library() is not None


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


def _call(function: str, shape: torch.Size, *tensors: Tensor | None) -> None:
    """Call a function of attention.cpp with the addresses of the `tensors`."""
    found = library()
    assert found is not None
    addresses = [t.data_ptr() if t is not None else None for t in tensors]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)  # the struct Forward or Backward
    getattr(found, function)(pointers, ctypes.byref(_Shape(*shape)))
