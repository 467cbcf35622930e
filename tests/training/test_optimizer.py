"""The AdamW of the training loop."""

from __future__ import annotations

import torch

from oelm.training.optimizer import AdamW


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
