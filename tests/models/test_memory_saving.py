"""The memory-saving operations have the values and gradients of plain autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oelm.models.gpt import GPT, gpt_config
from oelm.models.memory_saving import gelu_linear


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("trained", [True, False])
def test_gelu_linear_equals_plain_autograd(trained):
    layer = nn.Linear(6, 4)
    layer.requires_grad_(trained)
    x = torch.randn(2, 3, 6, generator=seeded()).requires_grad_()
    g = torch.randn(2, 3, 4, generator=seeded(1))
    plain = layer(F.gelu(x))
    wanted = [x, *layer.parameters()] if trained else [x]
    expected = torch.autograd.grad(plain, wanted, g)
    ours = gelu_linear(x, layer)
    assert torch.equal(ours, plain)
    for a, b in zip(torch.autograd.grad(ours, wanted, g), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_of_the_tied_weight_equals_plain_autograd(micro_batches):
    model = GPT(gpt_config("smoke", vocab_size=23, context=12), seeded())
    ids = torch.randint(23, (4, 13), generator=seeded(2))
    for part in ids.chunk(micro_batches):
        model.loss(part[:, :-1], part[:, 1:], reduction="sum").backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model.logits(ids[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    for name, p in model.named_parameters():
        assert torch.allclose(ours[name], p.grad, atol=1e-4), name
