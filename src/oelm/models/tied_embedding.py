"""An embedding whose gradient is added to that of the LM head with the same weight.

Plain autograd would store both gradients at the same time. The values are the same as those of plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class TiedGradient:
    """The gradient of the weight that LM head and embedding share.

    The backward pass of the LM head stores its part here; that of the embedding then adds its own part.
    """

    gradient: Tensor | None = None


def tied_embedding(ids: Tensor, weight: Tensor, tied: TiedGradient) -> Tensor:
    """Return weight[ids]; the backward pass adds its gradient to that of the LM head, which is in `tied`.

    Plain autograd would allocate a second gradient of the size of the weight, with zeros in most rows. The
    backward pass must reach the embedding: it returns the gradient of both. The embedding runs no hooks.
    """
    return _TiedEmbedding.apply(ids, weight, tied)


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, tied: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tied, ctx.shape = tied, weight.shape
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        (g,) = upstream
        gradient = ctx.tied.gradient
        if gradient is None:
            gradient = g.new_zeros(ctx.shape)
        ctx.tied.gradient = None
        return None, gradient.index_add_(0, ids.flatten(), g.reshape(-1, g.shape[-1])), None
