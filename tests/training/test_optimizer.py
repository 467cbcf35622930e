"""The AdamW and the gradient clipping of the training loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from oelm.training.optimizer import AdamW, clip_gradients


def trained(optimizer: type[torch.optim.AdamW]) -> list[torch.Tensor]:
    """Return the parameters and the optimizer state after a few steps with two groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
        for matrix in (True, False)
    ]
    made = optimizer(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for _ in range(5):
        made.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        made.step()
    moments = [state for p in model.parameters() for state in made.state[p].values()]
    return [*model.parameters(), *moments]


def test_the_updates_are_those_of_torch() -> None:
    ours, theirs = trained(AdamW), trained(torch.optim.AdamW)
    assert len(ours) == 6 + 3 * 6
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(tensor.requires_grad for tensor in ours[6:])


@pytest.mark.parametrize("max_norm", [0.1, 4.999, 5.0, 5.0001, 5.01, 1e3])
def test_clipping_gives_the_bits_of_torch(max_norm):
    ours, theirs = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    ours.grad, theirs.grad = torch.tensor([3.0, -4.0]), torch.tensor([3.0, -4.0])
    nn.utils.clip_grad_norm_([theirs], max_norm)
    assert clip_gradients(torch.optim.SGD([ours]), max_norm) == 5.0
    assert torch.equal(ours.grad, theirs.grad)


def test_clipping_passes_a_norm_of_nan_on():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, float("nan")])
    assert math.isnan(clip_gradients(torch.optim.SGD([p]), 1.0))
    assert p.grad.isnan().all()
