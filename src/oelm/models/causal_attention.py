"""Causal attention on a CPU, without most of the scores that the causal mask hides.

torch's CPU kernel processes 512 keys at a time, so for up to 512 tokens it computes all T x T scores. Here
the tokens are divided into four blocks, and the kernel is called three times:

    1 . . .     1: each block attends to itself (causal)
    2 1 . .     2: the second block of each pair attends to the first
    3 3 1 .     3: the second half attends to the first half
    3 3 2 1

That is 10 of 16 parts of the work. The results are merged with the log-sum-exp of the scores that the kernel
returns, as in ring attention (Liu et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def must_use_torch() -> bool:
    """Return whether torch's own attention must be called.

    That is the case while a mode of torch such as a FLOP counter, torch.func or torch.jit.trace follows the
    operations, or if the user has chosen another kernel with torch.nn.attention.sdpa_kernel.
    """
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    follows = modes > 0 or torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    return follows or not torch.backends.cuda.flash_sdp_enabled()  # despite its name also for the CPU


def refuse_second_derivatives() -> None:
    """Raise an error in a backward pass with create_graph=True.

    `once_differentiable` is not enough: torch.autograd.grad() may silently leave out its part of the result.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives of our attention and GELU are not supported; compute the forward pass within "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the outputs (B, T, nh, hs) of causal attention for q, k, v (B, T, nh, hs); 4 must divide T."""
    return _CausalAttention.apply(q.contiguous(), k.contiguous(), v.contiguous())


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        quarter = q.shape[1] // 4
        out, logs = _attend(*(_blocks(x, quarter) for x in (q, k, v)), 0.0, True)
        y = out.transpose(1, 2).reshape(q.shape)
        log_sum = logs.transpose(1, 2).reshape(q.shape[:3])  # (B, T, nh)
        for size in (quarter, 2 * quarter):
            out, logs = _attend(_second(q, size), _first(k, size), _first(v, size), 0.0, False)
            earlier, earlier_logs = _second(y, size), _second(log_sum, size)  # views: updated in place
            earlier.lerp_(out, (logs - earlier_logs).sigmoid().unsqueeze(-1))
            earlier_logs.copy_(torch.logaddexp(earlier_logs, logs))
        ctx.save_for_backward(q, k, v, y, log_sum)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        refuse_second_derivatives()
        q, k, v, y, log_sum = ctx.saved_tensors
        g = upstream[0].contiguous()
        quarter = q.shape[1] // 4
        parts = _attend_backward(*(_blocks(x, quarter) for x in (g, q, k, v, y, log_sum)), 0.0, True)
        grad_q, grad_k, grad_v = (x.transpose(1, 2).reshape(q.shape) for x in parts)
        for size in (quarter, 2 * quarter):
            keys, values = _first(k, size), _first(v, size)
            queries, outputs, logs = _second(q, size), _second(y, size), _second(log_sum, size)
            dq, dk, dv = _attend_backward(_second(g, size), queries, keys, values, outputs, logs, 0.0, False)
            _second(grad_q, size).add_(dq)
            _first(grad_k, size).add_(dk)
            _first(grad_v, size).add_(dv)
        return grad_q, grad_k, grad_v


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return a view of x (B, T, nh, ...) as blocks of `size` tokens: (B * T / size, nh, size, ...)."""
    return x.view(-1, size, *x.shape[2:]).transpose(1, 2)


def _first(x: Tensor, size: int) -> Tensor:
    """Return a view of the blocks of `_blocks()` that are the first of a pair."""
    return _blocks(x, size)[0::2]


def _second(x: Tensor, size: int) -> Tensor:
    """Return a view of the blocks of `_blocks()` that are the second of a pair."""
    return _blocks(x, size)[1::2]
