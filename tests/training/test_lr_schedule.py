"""The learning-rate schedule, and optimizer state by parameter name."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.config.run_config import OptimConfig
from oelm.errors import OelmError
from oelm.methods.apply import apply
from oelm.models.gpt import GPT, gpt_config
from oelm.training.optimizer import build_optimizer, load_optimizer_state, lr_factor, optimizer_state

CPU = torch.device("cpu")


@given(
    total=st.integers(1, 5000),
    warm=st.integers(0, 1000),
    kind=st.sampled_from(["cosine", "linear", "constant"]),
    end=st.floats(0, 1),
)
def test_the_factor_rises_to_one_and_then_never_rises(total, warm, kind, end):
    optim = OptimConfig(schedule=kind, warmup_steps=warm, final_lr_share=end)
    factors = [lr_factor(optim, step, total) for step in range(0, total, max(1, total // 50))]
    steps = list(range(0, total, max(1, total // 50)))
    assert all(0 <= factor <= 1 for factor in factors)
    after = [factor for step, factor in zip(steps, factors, strict=True) if step >= warm]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if 0 < warm < total:
        assert lr_factor(optim, warm - 1, total) == 1.0
        assert lr_factor(optim, warm, total) == 1.0


def test_the_factor_at_the_middle_and_end_of_a_schedule():
    cosine = OptimConfig(schedule="cosine", final_lr_share=0.1)
    assert lr_factor(cosine, 1000, 1000) == pytest.approx(0.1)
    share = OptimConfig(schedule="linear", warmup_share=0.1)
    assert lr_factor(share, 49, 1000) == 0.5
    assert lr_factor(share, 550, 1000) == pytest.approx(0.5)


def test_optimizer_state_is_saved_by_name_and_only_for_trainable_parameters(tmp_path):
    model = GPT(gpt_config("smoke", vocab_size=40, context=8), torch.Generator().manual_seed(0))
    apply(model, "oelm-freeze")
    optimizer = build_optimizer(model, OptimConfig())
    ids = torch.arange(16).view(2, 8)
    model.loss(ids, ids).backward()
    optimizer.step()
    state = optimizer_state(model, optimizer)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert not frozen & set(state)
    other = build_optimizer(model, OptimConfig())
    load_optimizer_state(model, other, state)
    again = optimizer_state(model, other)
    assert all(torch.equal(again[n][k], v) for n, values in state.items() for k, v in values.items())
    with pytest.raises(OelmError, match="which this model does not have"):
        load_optimizer_state(model, other, {"no.such": {}})
