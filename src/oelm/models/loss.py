"""Compute the cross-entropy of a language model in chunks, so that not all logits are in memory at once.

With GPT-2's vocabulary of 50257 tokens, the logits are the largest tensor of a training step: for 4 x 512
positions, they take 412 MB in fp32, and plain cross-entropy keeps three such tensors. Here the forward pass
processes one chunk of positions after the other: it computes the logits of the chunk and their gradients, and
discards the logits.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from oelm import compiled
from oelm.compiled.products import product
from oelm.models.tied_embedding import TiedGradient

IGNORE = -100  # targets with this value are ignored, as in torch.nn.functional.cross_entropy

# Number of logits per chunk. 1024 x 50257 logits are 206 MB in fp32. Smaller chunks make the matrix products
# slower, larger ones hardly faster.
CHUNK_ELEMENTS = 1024 * 50_304


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, tied: TiedGradient | None = None
) -> Tensor:
    """Return the sum over tokens of -log softmax(hidden @ weight.T)[target].

    The shapes are hidden (N, d), weight (V, d), targets (N,). Targets equal to IGNORE do not count.
    If `tied` is given, the gradient of `weight` is stored in it instead of being returned, and the backward
    pass of `tied_embedding()` adds the gradient of the embedding to it.
    """
    _check_targets(hidden, targets)
    if torch.compiler.is_compiling():  # torch.compile of torch 2.13 fails on softmax with out=
        # Not a decorator: it would import the compiler, which takes almost as long as `import torch`.
        return torch.compiler.disable(_cross_entropy_sum)(hidden, weight, targets, tied)
    return _cross_entropy_sum(hidden, weight, targets, tied)


def _cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor, tied: TiedGradient | None) -> Tensor:
    if not len(targets):
        return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wants_grad:
        return cross_entropy_each(hidden, weight, targets).sum()
    return _ChunkedCrossEntropy.apply(hidden, weight, targets, tied)


def _check_targets(hidden: Tensor, targets: Tensor) -> None:
    if targets.dtype != torch.int64:
        raise TypeError(f"the targets must be int64, not {targets.dtype}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"{len(hidden)} hidden states do not match targets of shape {tuple(targets.shape)}")


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products.

    It is the dtype that autocast would choose. Autocast itself has no effect inside autograd functions.
    """
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    rows = max(1, min(tokens, CHUNK_ELEMENTS // vocabulary))
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


@torch.no_grad()
def cross_entropy_each(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target (N,) in fp32, without gradients.

    The arguments are those of `cross_entropy_sum()`.
    """
    _check_targets(hidden, targets)
    dtype = _compute_dtype(hidden)
    w = weight.to(dtype)
    losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    for part in _chunks(len(targets), len(weight)):
        logits = product(hidden[part].to(dtype), w.T).float()  # (n, V)
        losses[part] = torch.nn.functional.cross_entropy(
            logits, targets[part], ignore_index=IGNORE, reduction="none"
        )
    return losses


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, tied: TiedGradient | None
    ) -> Tensor:
        dtype = _compute_dtype(hidden)
        w, h = weight.detach().to(dtype), hidden.detach().to(dtype)
        grad_h = torch.empty_like(hidden) if hidden.requires_grad else None
        grad_w = torch.empty_like(weight) if weight.requires_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        parts = _chunks(len(targets), len(weight))
        # Pad the vocabulary to a multiple of 64: with the 50257 columns of GPT-2, the matrix products are
        # much slower.
        aligned = -(-len(w) // 64) * 64
        buffer = _scratch(parts[0].stop * aligned, dtype, w.device).view(-1, aligned)
        for part in parts:
            rows = buffer[: part.stop - part.start]
            loss, gradient, factors = _loss_and_gradient(rows, h[part], w, targets[part])
            total += loss
            if grad_h is not None:
                grad_h[part] = factors * product(gradient, w)
            if grad_w is not None:
                product(gradient.T, factors * h[part], out=grad_w, add=part.start > 0)
        ctx.grads, ctx.tied = (grad_h, grad_w), tied
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (scale,) = upstream
        if torch.is_grad_enabled():  # create_graph=True; the stored gradients are constants of the graph
            raise RuntimeError(
                "cross_entropy_sum: second derivatives are not supported; compute the loss from the logits"
            )
        if ctx.grads is None:
            raise RuntimeError(
                "cross_entropy_sum: a second backward pass is not supported; compute the loss again"
            )
        grads, ctx.grads = ctx.grads, None  # mul_ scales the stored gradients in place, so use them only once
        grad_h, grad_w = (g.mul_(scale) if g is not None else None for g in grads)
        if ctx.tied is not None:
            ctx.tied.gradient, grad_w = grad_w, None
        return grad_h, grad_w, None, None


_kept = threading.local()


def _scratch(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor with `size` elements for the logits of a chunk.

    On a CPU, the next training step reuses the memory, because newly allocated memory is slow: the operating
    system has to fill it with zeros first.
    """
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    held: Tensor | None = getattr(_kept, "memory", None)
    if held is None or held.dtype != dtype or held.numel() < size:
        with torch.inference_mode(False):
            held = torch.empty(size, dtype=dtype, device=device)
        if type(held) is Tensor:  # torch.compile traces with a FakeTensor, which must not be kept
            _kept.memory = held
    return held[:size]


def _loss_and_gradient(
    buffer: Tensor, h: Tensor, w: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and two tensors (n, V) and (n, 1) whose product is d loss / d logits.

    The loss is the sum of the cross-entropies of the n targets. If `buffer` is in fp32, the result is stored
    in it.
    """
    logits = buffer[:, : len(w)]
    product(h, w.T, out=logits)
    if compiled.runs_cross_entropy(logits, targets):
        losses, factors = compiled.cross_entropy(logits, targets)
        return losses.sum(), logits, factors[:, None]
    buffer[:, len(w) :] = float("-inf")  # padding columns get probability 0
    if buffer.dtype == torch.float32:
        p = torch.softmax(buffer, dim=-1, out=buffer)[:, : len(w)]
    else:
        p = torch.softmax(buffer, dim=-1, dtype=torch.float32)[:, : len(w)]
    counts = targets != IGNORE
    p_target = p.gather(1, _target_index(targets)[:, None]).squeeze(1)
    losses = -p_target.log()
    tiny = counts & (p_target < 1e-30)  # p underflows in these few rows: recompute them with log-softmax
    if bool(tiny.any()):
        few = (h[tiny] @ w.T).float()
        losses[tiny] = torch.nn.functional.cross_entropy(few, targets[tiny], reduction="none")
    gradient = p.to(h.dtype)
    _subtract_onehot(gradient, targets)
    return losses[counts].sum(), gradient, gradient.new_ones(len(h), 1)


def _target_index(targets: Tensor) -> Tensor:
    """Return the targets with IGNORE replaced by 0; others stay, so that invalid targets cause an error."""
    return targets.masked_fill(targets == IGNORE, 0)


def _subtract_onehot(p: Tensor, targets: Tensor) -> None:
    """Subtract onehot(target) from p in place; rows with an ignored target become zero."""
    counts = targets != IGNORE
    rows = torch.arange(len(targets), device=targets.device)
    p[rows, _target_index(targets)] -= counts.to(p.dtype)
    if not bool(counts.all()):
        p[~counts] = 0
