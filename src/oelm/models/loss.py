"""Cross-entropy of a language model without its logits in memory.

The logits of one micro-batch of GPT-2's vocabulary are the largest tensor of a training step: 4 x 512
tokens x 50257 words in fp32 are 412 MB, and plain cross-entropy holds three of them. Here the tokens go
through the head in chunks. Each chunk's softmax is turned into its share of the gradients at once,
while it is still in the cache, and forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100  # a target that counts for nothing, as in torch.nn.functional.cross_entropy

# 512 x 50257 fp32 logits are 98 MB: large enough to keep the matrix products at full speed,
# small enough to be a fraction of the weights (see benchmarks/loss_chunk.py).
CHUNK_ELEMENTS = 512 * 50_304


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[target], differentiable in `hidden` and `weight`.

    hidden (N, d), weight (V, d), targets (N,) with IGNORE where a token does not count.
    """
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wants_grad:
        return _total_loss(hidden, weight, targets)
    return _ChunkedCrossEntropy.apply(hidden, weight, targets)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast does not reach into a custom function: choose the type of the matrix products as it would."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    rows = max(1, min(tokens, CHUNK_ELEMENTS // vocabulary))
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _total_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    dtype = _compute_dtype(hidden)
    w = weight.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in _chunks(len(targets), len(weight)):
        logits = (hidden[part].to(dtype) @ w.T).float()  # (n, V)
        total += torch.nn.functional.cross_entropy(
            logits, targets[part], ignore_index=IGNORE, reduction="sum"
        )
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        dtype = _compute_dtype(hidden)
        w, h = weight.detach().to(dtype), hidden.detach().to(dtype)
        grad_h = torch.empty_like(hidden) if hidden.requires_grad else None
        grad_w = torch.zeros_like(weight) if weight.requires_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        buffer: Tensor | None = None
        for part in _chunks(len(targets), len(weight)):
            t = targets[part]
            if buffer is None or len(buffer) != len(t):
                buffer = torch.empty((len(t), len(w)), dtype=dtype, device=w.device)
            p, loss = _softmax_and_loss(torch.mm(h[part], w.T, out=buffer), h[part], w, t)
            total += loss
            # d loss / d logits = softmax - onehot(target), zero rows where the target is ignored
            rows = torch.arange(len(t), device=t.device)
            counts = t != IGNORE
            p[rows, t.clamp(min=0)] -= counts.to(p.dtype)
            if not bool(counts.all()):
                p[~counts] = 0
            if grad_h is not None:
                grad_h[part] = p @ w
            if grad_w is not None:
                if dtype == grad_w.dtype:
                    grad_w.addmm_(p.T, h[part])
                else:
                    grad_w += p.T @ h[part]
        ctx.grads = (grad_h, grad_w)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (scale,) = upstream
        if ctx.grads is None:
            raise RuntimeError("cross_entropy_sum: its gradients were used up by an earlier backward pass")
        grads, ctx.grads = ctx.grads, None  # they are scaled in place, so they serve once
        grad_h, grad_w = (g.mul_(scale) if g is not None else None for g in grads)
        return grad_h, grad_w, None


def _softmax_and_loss(logits: Tensor, h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of the (n, V) logits, in place where the type allows, and the summed loss of its rows."""
    counts = targets != IGNORE
    index = targets.clamp(min=0)[:, None]
    if logits.dtype == torch.float32:
        p = torch.softmax(logits, dim=-1, out=logits)
    else:
        p = torch.softmax(logits, dim=-1, dtype=torch.float32)
    p_target = p.gather(1, index).squeeze(1)
    losses = -p_target.log()
    lost = counts & (p_target < 1e-30)  # underflow: rare, so those rows are done again in the log domain
    if bool(lost.any()):
        again = (h[lost] @ w.T).float()
        losses[lost] = torch.nn.functional.cross_entropy(again, targets[lost], reduction="none")
    return p.to(h.dtype), losses[counts].sum()
