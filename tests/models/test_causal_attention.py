"""Causal attention in blocks, against torch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oelm.models.causal_attention import causal_attention
from oelm.models.gpt import GPT, GPTConfig


def inputs(tokens: int, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    shape = (2, tokens, 3, 8)
    return [scale * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize(("tokens", "scale"), [(4, 1.0), (20, 1.0), (512, 1.0), (64, 30.0)])
def test_outputs_and_gradients_are_those_of_torch(tokens, scale):
    *qkv, g = inputs(tokens, scale)
    ours, theirs = ([x.clone().requires_grad_() for x in qkv] for _ in range(2))
    y = causal_attention(*ours)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in theirs), is_causal=True)
    torch.testing.assert_close(y, expected.transpose(1, 2))
    y.backward(g)
    expected.transpose(1, 2).backward(g)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_long_row_gives_the_gradients_of_the_plain_gpt(monkeypatch):
    model = GPT(GPTConfig(vocab_size=11, context=512, width=16, layers=2, heads=2, ff=32, dropout=0.0))
    ids = torch.randint(0, 11, (2, 513), generator=torch.Generator().manual_seed(0))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        return [p.grad.clone() for p in model.parameters()]

    blocked = gradients()
    monkeypatch.setattr("oelm.models.gpt.BLOCKED_ATTENTION", 10**9)
    for a, b in zip(blocked, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
