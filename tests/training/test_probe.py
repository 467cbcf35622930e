"""The probe of queries and keys: constant part, attention by distance, rank of the learned change."""

from __future__ import annotations

import pytest
import torch

from oelm.methods.apply import apply
from oelm.models.gpt import GPT, gpt_config
from oelm.training.measure.probe import attention_by_distance, constant_share, truncation

IDS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))


def gpt(method: str = "oelm-bias") -> GPT:
    model = GPT(
        gpt_config("smoke", vocab_size=64, context=16, position="rope"), torch.Generator().manual_seed(0)
    )
    apply(model, method, seed=1)
    return model.eval()


def set_biases(model: GPT, value: float) -> None:
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q.extra_bias.fill_(value)
            block.attn.k.extra_bias.fill_(value)


def test_the_constant_share_is_that_of_the_bias() -> None:
    model = gpt()
    small = constant_share(model, IDS)
    set_biases(model, 10.0)
    large = constant_share(model, IDS)
    for layer, row in enumerate(large):
        for role in ("q", "k"):
            assert 0 <= small[layer][role] < 0.5
            assert 0.99 < row[role] <= 1


def test_attention_by_distance_sums_to_one_and_follows_the_biases() -> None:
    model = gpt()
    set_biases(model, 1.0)  # constant q = k: with rotary positions a token attends to itself most
    for weights in attention_by_distance(model, IDS, 16):
        assert weights.shape == (4, 16)
        assert torch.allclose(weights.sum(1), torch.ones(4), atol=1e-5)  # the last query sees 16 tokens
        assert (weights.argmax(1) == 0).all()
    with pytest.raises(ValueError, match="between 1 and 16"):
        attention_by_distance(model, IDS, 17)


def test_truncation_undoes_or_keeps_the_learned_change() -> None:
    initial, model = gpt("trained-bias"), gpt("trained-bias")
    with torch.no_grad():
        for block in model.blocks:  # a change of rank 2
            block.attn.q.weight += torch.randn(32, 2) @ torch.randn(2, 32)
            block.attn.k.weight += torch.randn(32, 2) @ torch.randn(2, 32)

    @torch.no_grad()
    def loss(of: GPT = model) -> float:
        return float(of.loss(IDS[:, :-1], IDS[:, 1:]))

    before = {name: p.clone() for name, p in model.named_parameters()}
    found = truncation(model, initial, loss, [0, 1, 2, 32])
    assert found[0] == pytest.approx(loss(initial), abs=1e-6)
    assert found[2] == pytest.approx(loss(), abs=1e-4)
    assert found[32] == pytest.approx(loss(), abs=1e-4)
    assert abs(found[1] - loss()) > 1e-4
    assert truncation(model, initial, loss, [0], layers=[])[0] == loss()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
