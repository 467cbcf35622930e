"""What the figures of the original study imply by arithmetic, without a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 2**20
BERT_TOTAL = 109_484_547
BERT_FROZEN = 12 * 2 * (768 * 768 + 768)  # twelve layers, Q and K, weights and biases


@dataclass(frozen=True)
class GPTShape:
    """The model Medium-512 of the original study.

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
        """Tied embedding, learned positions, blocks and a final LayerNorm. A block has two LayerNorms, four
        projections without bias and an MLP with biases."""
        d, ff = self.width, self.feed_forward
        block = 4 * d * d + 2 * d * ff + ff + d + 4 * d
        return self.vocabulary * d + self.context * d + self.layers * block + 2 * d

    @property
    def qk(self) -> int:
        return 2 * self.layers * self.width**2

    @property
    def checkpoint_bytes(self) -> int:
        """fp32 weights and Adam's two moments."""
        return 12 * self.parameters

    @property
    def frozen_checkpoint_bytes(self) -> int:
        """The same without moments for Q/K."""
        return self.checkpoint_bytes - 8 * self.qk


def weight_gradient_bound(expansion: int = 4) -> float:
    """The share of a block's matmul FLOPs in the weight gradients of Q and K: 4/72 for a 4x MLP.

    In units of d^2 per token, a block has 4 projections and an MLP of 2 x expansion: 12 units. Each takes
    2 FLOPs in the forward pass, the input gradient and the weight gradient: 72. Freezing saves 2 x 2.

    >>> round(100 * weight_gradient_bound(), 2)
    5.56
    """
    units = 4 + 2 * expansion
    return 2 * 2 / (3 * 2 * units)


def row_norm(sd: float, width: int) -> float:
    """The expected norm of a row of N(0, sd) entries; an orthonormal row has norm 1.

    >>> round(row_norm(0.02, 512), 2)
    0.45
    """
    return sd * math.sqrt(width)


def logit_ratio(sd: float, width: int) -> float:
    """How many times larger attention logits are with orthonormal rows in Q and K than with N(0, sd) rows."""
    return 1 / row_norm(sd, width) ** 2


def epochs(steps: int, batch: int, context: int, tokens: float) -> float:
    """The number of passes over a corpus of `tokens` tokens."""
    return steps * batch * context / tokens


def accuracy_noise(accuracy: float, reference: float, examples: int) -> float:
    """The standard error, in points, of the difference of two accuracies in per cent on `examples` test rows.

    It assumes independent answers. Pairing usually makes the error smaller, seeds make it larger.
    """
    a, b = accuracy / 100, reference / 100
    return 100 * math.sqrt((a * (1 - a) + b * (1 - b)) / examples)
