"""Cross-entropy of a language model without its logits in memory.

The logits of one micro-batch of GPT-2's vocabulary are the largest tensor of a training step: 4 x 512
tokens x 50257 words in fp32 are 412 MB, and plain cross-entropy holds three of them. Here the tokens go
through the head in chunks. Each chunk's softmax is turned into its share of the gradients at once,
while it is still in the cache, and forgotten.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from oelm.models.memory_saving import Tie

IGNORE = -100  # a target that counts for nothing, as in torch.nn.functional.cross_entropy

# 512 x 50257 fp32 logits are 98 MB: large enough to keep the matrix products at full speed,
# small enough to be a fraction of the weights.
CHUNK_ELEMENTS = 512 * 50_304


@torch.compiler.disable  # inductor (torch 2.13) fails on the softmax into a buffer
def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, tie: Tie | None = None) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[target], differentiable in `hidden` and `weight`.

    hidden (N, d), weight (V, d), targets (N,) with IGNORE where a token does not count.
    With a `tie`, the gradient of `weight` is left there for the embedding to complete.
    """
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wants_grad:
        return _total_loss(hidden, weight, targets)
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, tie)


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
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tie: Tie | None) -> Tensor:
        dtype = _compute_dtype(hidden)
        w, h = weight.detach().to(dtype), hidden.detach().to(dtype)
        grad_h = torch.empty_like(hidden) if hidden.requires_grad else None
        grad_w = torch.empty_like(weight) if weight.requires_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        parts = _chunks(len(targets), len(weight))
        # Rows of a length that is a multiple of 64 keep each of them aligned: with GPT-2's odd 50257
        # the matrix products on either side of the softmax lose a quarter of their speed.
        aligned = -(-len(w) // 64) * 64
        buffer = _scratch(parts[0].stop * aligned, dtype, w.device).view(-1, aligned)
        for part in parts:
            p, loss = _softmax_and_loss(buffer[: part.stop - part.start], h[part], w, targets[part])
            total += loss
            _subtract_onehot(p, targets[part])  # now p is d loss / d logits
            if grad_h is not None:
                grad_h[part] = p @ w
            if grad_w is not None:
                _accumulate(grad_w, p.T, h[part], first=part.start == 0)
        ctx.grads, ctx.tie = (grad_h, grad_w), tie
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (scale,) = upstream
        if ctx.grads is None:
            raise RuntimeError("cross_entropy_sum: its gradients were used up by an earlier backward pass")
        grads, ctx.grads = ctx.grads, None  # they are scaled in place, so they serve once
        grad_h, grad_w = (g.mul_(scale) if g is not None else None for g in grads)
        if ctx.tie is not None:
            ctx.tie.gradient, grad_w = grad_w, None
        return grad_h, grad_w, None, None


_kept = threading.local()


def _scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the logits of a chunk. On a CPU it is kept from step to step, for the system clears every
    page of a fresh allocation; a GPU's allocator keeps it anyway."""
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    held: Tensor | None = getattr(_kept, "memory", None)
    if held is None or held.dtype != dtype or held.numel() < size:
        with torch.inference_mode(False):
            held = torch.empty(size, dtype=dtype, device=device)
        if type(held) is Tensor:  # not a stand-in that traces shapes
            _kept.memory = held
    return held[:size]


def _softmax_and_loss(buffer: Tensor, h: Tensor, w: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(h w^T), a view of (n, V) in `buffer` where the type allows, and the summed loss of its rows."""
    buffer[:, len(w) :] = float("-inf")  # the columns that only align the rows get probability 0
    torch.mm(h, w.T, out=buffer[:, : len(w)])
    if buffer.dtype == torch.float32:
        p = torch.softmax(buffer, dim=-1, out=buffer)[:, : len(w)]
    else:
        p = torch.softmax(buffer, dim=-1, dtype=torch.float32)[:, : len(w)]
    counts = targets != IGNORE
    p_target = p.gather(1, _place(targets)[:, None]).squeeze(1)
    losses = -p_target.log()
    lost = counts & (p_target < 1e-30)  # underflow: rare, so those rows are done again in the log domain
    if bool(lost.any()):
        again = (h[lost] @ w.T).float()
        losses[lost] = torch.nn.functional.cross_entropy(again, targets[lost], reduction="none")
    return p.to(h.dtype), losses[counts].sum()


def _place(targets: Tensor) -> Tensor:
    """Where to look: anywhere for what does not count. Any other negative target (the classic -1) stays as
    it is and is out of bounds, as in plain cross-entropy."""
    return targets.masked_fill(targets == IGNORE, 0)


def _subtract_onehot(p: Tensor, targets: Tensor) -> None:
    """p - onehot(target) in place, and zero rows where the target does not count."""
    counts = targets != IGNORE
    rows = torch.arange(len(targets), device=targets.device)
    p[rows, _place(targets)] -= counts.to(p.dtype)
    if not bool(counts.all()):
        p[~counts] = 0


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total (+)= a @ b, in the type of `total` whatever the type of the factors."""
    if total.dtype != a.dtype:
        product = (a @ b).to(total.dtype)
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)
