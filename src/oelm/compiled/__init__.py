"""Attention, GELU and cross-entropy by our own C++ code (kernels.cpp), for faster training on a CPU.

`oelm.compiled.products` adds matrix products (products.cpp).

The installation compiles it if there is a C++ compiler. Otherwise, and on x86 CPUs without AVX2, torch
computes them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

VERSION = 4  # as oelm_version() in kernels.cpp
HEAD_SIZES = (8, 16, 32, 64)  # one_head() in kernels.cpp has these
MAX_TOKENS = 1024  # with more tokens per row, the data of a head no longer fits into the cache


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if there is none, or if this CPU cannot run it."""
    spec = importlib.util.find_spec("oelm.compiled._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        return found if found.oelm_version() == VERSION and found.oelm_instruction_set() else None
    except (OSError, AttributeError):  # compiled for another system, or from a kernels.cpp without a version
        return None


@functools.cache
def instruction_set() -> int:
    """Return the instruction set that the library uses, as kernels.cpp numbers them."""
    found = library()
    assert found is not None
    return int(found.oelm_instruction_set())


def on_plain_cpu(x: Tensor) -> bool:
    """Return whether x is on a CPU, without autocast and torch.compile: where our own operations are used."""
    kind = x.device.type
    return kind == "cpu" and not torch.is_autocast_enabled(kind) and not torch.compiler.is_compiling()


def runs_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether to compute causal attention for q, k, v (B, T, nh, hs) with `attention()`."""
    fits = q.shape == k.shape == v.shape and q.shape[1] <= MAX_TOKENS and q.shape[3] in HEAD_SIZES
    return fits and runs(q, k, v)


def runs_gelu(x: Tensor) -> bool:
    """Return whether to compute the GELU of x with `gelu_and_derivative()`."""
    return runs(x)


def runs_cross_entropy(logits: Tensor, targets: Tensor) -> bool:
    """Return whether to compute the cross-entropies of logits (n, V) with `cross_entropy()`."""
    plain = type(targets) is Tensor and targets.dtype == torch.int64 and targets.device == logits.device
    return plain and targets.shape == logits.shape[:1] and logits.stride(-1) == 1 and runs(logits)


def runs(*tensors: Tensor) -> bool:
    """Return whether the C++ code can be used for `tensors`."""
    # The first test comes first, because torch.compile cannot follow the others.
    if not all(on_plain_cpu(x) and _is_plain(x) for x in tensors) or must_use_torch():
        return False
    found = library()
    return found is not None and (torch.get_num_threads() == 1 or bool(found.oelm_has_threads()))


def _is_plain(x: Tensor) -> bool:
    """Return whether the C++ code can read the memory of x: fp32 numbers with strides."""
    if type(x) not in (Tensor, nn.Parameter) or x.dtype != torch.float32 or x.layout != torch.strided:
        return False
    without_own_memory = x._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(x)
    return not (x.is_neg() or x.is_nested or without_own_memory)


def must_use_torch() -> bool:
    """Return whether torch's own operations must be called.

    That is the case while a mode of torch such as a FLOP counter, torch.func, forward-mode differentiation or
    torch.jit.trace follows the operations, or if the user has chosen another kernel with
    torch.nn.attention.sdpa_kernel.
    """
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    follows = modes > 0 or torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    # flash_sdp_enabled() also applies to the CPU, despite its module.
    return follows or forward_mode or not torch.backends.cuda.flash_sdp_enabled()


def refuse_second_derivatives() -> None:
    """Raise an error in a backward pass with create_graph=True.

    `once_differentiable` is not enough: torch.autograd.grad() may silently leave out its part of the result.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives of our attention and GELU are not supported; compute the forward pass within "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )


def attention(q: Tensor, k: Tensor, v: Tensor, rotation: Tensor | None) -> Tensor:
    """Return the outputs (B, T, nh, hs) of causal attention; `runs_attention()` must be true for q, k, v.

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


def gelu_and_derivative(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact GELU of each element of x, and its derivative."""
    x = x.contiguous()
    y, derivative = torch.empty_like(x), torch.empty_like(x)
    _call("oelm_gelu", (x.numel(), 1, 1, 1), x, None, y, derivative)
    return y, derivative


def gelu_and_gradient(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu(x), and the gradient of x for the `gradient` of gelu(x), whose memory it overwrites."""
    x, gradient = x.contiguous(), gradient.contiguous()
    y = torch.empty_like(x)
    _call("oelm_gelu", (x.numel(), 1, 1, 1), x, gradient, y, gradient)
    return y, gradient


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropies (n,) of logits (n, V), and factors (n,), and overwrite the logits.

    `runs_cross_entropy()` must be true.
    The gradient of the logits is now each row of `logits` times its factor. Rows with target -100 get zeros.
    """
    losses, factors = logits.new_empty(2, len(logits))
    sizes = (*logits.shape, logits.stride(0), 1)
    if not _call("oelm_cross_entropy", sizes, logits, targets.contiguous(), losses, factors):
        raise IndexError(f"a target is out of bounds for {logits.shape[1]} tokens")
    return losses, factors


def _call(function: str, sizes: Sequence[int], *tensors: Tensor | None) -> int:
    """Call a function of kernels.cpp with the addresses of the `tensors`.

    sizes: rows, tokens, heads and head size of the struct Shape
    """
    addresses = [t.data_ptr() if t is not None else None for t in tensors]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)  # the struct Forward, Backward, Gelu, ...
    shape = (ctypes.c_int64 * 6)(*sizes, torch.get_num_threads(), instruction_set())
    return int(getattr(library(), function)(pointers, shape))
