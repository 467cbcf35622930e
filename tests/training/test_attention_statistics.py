"""Entropy, logit scale and orthogonality of attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oelm.methods.apply import apply
from oelm.models.gpt import GPT, GPTConfig
from oelm.training.measure.attention import attention_statistics, off_orthogonal

CPU = torch.device("cpu")


def test_attention_of_an_untrained_gpt_is_almost_uniform():
    config = GPTConfig(vocab_size=50, context=12, width=16, layers=2, heads=4, ff=32)
    model = GPT(config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    layers = attention_statistics(model, {"ids": ids}, CPU)
    uniform = np.mean([math.log(t) for t in range(1, 13)])
    assert len(layers) == 2
    for layer in layers:
        assert layer["entropy"] == pytest.approx(uniform, rel=1e-3)
        assert len(layer["entropy_heads"]) == 4
        assert layer["logit_scale"] < 0.1
        assert layer["off_orthogonal_q"] > 0.05
    apply(model, "oelm-freeze")
    assert "off_orthogonal_q" not in attention_statistics(model, {"ids": ids}, CPU)[0]
    assert off_orthogonal(torch.linalg.qr(torch.randn(3, 16, 4)).Q.mT) < 1e-6


def test_attention_statistics_ignore_padding():
    config = GPTConfig(vocab_size=50, context=12, width=16, layers=1, heads=2, ff=32, classes=2, causal=False)
    model = GPT(config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.long)], 1)
    lengths = torch.tensor([6, 6])
    plain = attention_statistics(model, {"ids": ids, "lengths": lengths}, CPU)
    assert attention_statistics(model, {"ids": padded, "lengths": lengths}, CPU) == plain
