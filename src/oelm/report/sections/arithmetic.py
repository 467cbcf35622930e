"""Compute what follows from the numbers of the original study by arithmetic, without training a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 2**20
BERT_TOTAL = 109_484_547
BERT_FROZEN = 12 * 2 * (768 * 768 + 768)  # weights and biases of Q and K in twelve layers of BERT-base


@dataclass(frozen=True)
class GPTShape:
    """The sizes of the original study's GPT model, Medium-512.

    >>> GPTShape().parameters, GPTShape().qk
    (44896768, 3145728)
    """

    vocabulary: int = 50_257
    context: int = 512
    width: int = 512
    layers: int = 6
    feed_forward: int = 2048

    @property
    def parameters(self) -> int:
        """Number of parameters: tied embedding, learned positions, blocks and a final LayerNorm.

        A block has two LayerNorms, four projections without bias, and an MLP with biases.
        """
        d, ff = self.width, self.feed_forward
        block = 4 * d * d + 2 * d * ff + ff + d + 4 * d
        return self.vocabulary * d + self.context * d + self.layers * block + 2 * d

    @property
    def qk(self) -> int:
        return 2 * self.layers * self.width**2

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint with fp32 weights and Adam's two moments."""
        return 12 * self.parameters

    @property
    def frozen_checkpoint_bytes(self) -> int:
        """Size of a checkpoint with frozen Q/K, for which Adam keeps no moments."""
        return self.checkpoint_bytes - 8 * self.qk


def weight_gradient_bound() -> float:
    """Return the fraction of a block's matmul FLOPs that the weight gradients of Q and K take.

    A d x d projection has d^2 weights, which we call one unit. A block has 4 projections of 1 unit, and an
    MLP of 4 times the width has 2 x 4 units, together 12 units. For each token, each unit takes 2 d^2 FLOPs
    in the forward pass, 2 for the input gradient and 2 for the weight gradient, together 72 d^2 FLOPs.
    Freezing Q and K saves the weight gradients of 2 units, 4 d^2 FLOPs.

    >>> round(100 * weight_gradient_bound(), 2)
    5.56
    """
    return 4 / 72


def row_norm(sd: float, width: int) -> float:
    """Return the expected norm of a row of `width` entries from N(0, sd). (An orthonormal row has norm 1.)

    >>> round(row_norm(0.02, 512), 2)
    0.45
    """
    return sd * math.sqrt(width)


def logit_ratio(sd: float, width: int) -> float:
    """Return how many times larger attention logits are with orthonormal Q/K rows than with N(0, sd) rows."""
    return 1 / row_norm(sd, width) ** 2


def epochs(steps: int, batch: int, context: int, tokens: float) -> float:
    """Return how many passes over a corpus of `tokens` tokens a training run makes."""
    return steps * batch * context / tokens


def accuracy_noise(accuracy: float, reference: float, examples: int) -> float:
    """Return the standard error, in percentage points, of the difference of two accuracies in per cent.

    Both accuracies are measured on `examples` test rows, and the answers of the two models are assumed to be
    independent. The actual standard error is usually smaller, because both models are tested on the
    same rows. The variation between seeds is not included.
    """
    a, b = accuracy / 100, reference / 100
    return 100 * math.sqrt((a * (1 - a) + b * (1 - b)) / examples)
