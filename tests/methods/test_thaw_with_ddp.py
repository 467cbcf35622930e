"""A tensor that a schedule unfreezes under DDP is the same on all ranks, or there is an error."""

from __future__ import annotations

import os

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing import spawn

import oelm
from oelm.errors import OelmError

STEPS = 6


def train(rank: int, port_file: str, prepare: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = distributed.FileStore(port_file, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        applied = oelm.apply(model, "oelm-gradual", seed=0)
        optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-2))
        if prepare:
            applied.unfreeze_until_step()
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(rank))  # other rows on each rank
        for step in range(STEPS):
            applied.step(step, STEPS, optimizer)
            (wrapped(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert oelm.audit(model, optimizer).ok
        for name, parameter in model.named_parameters():
            first = parameter.detach().clone()
            distributed.broadcast(first, 0)
            assert torch.equal(first, parameter), f"{name} differs between the ranks"
        del wrapped
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_unfrozen_tensors_are_equal_on_both_ranks(tmp_path):
    spawn(train, (str(tmp_path / "store"), True), nprocs=2)


def test_a_tensor_that_ddp_does_not_know_is_not_unfrozen(monkeypatch):
    monkeypatch.setattr("oelm.methods.apply._several_ranks", lambda: True)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2)
    applied = oelm.apply(model, "oelm-gradual", seed=0)
    applied.step(0, STEPS)
    with pytest.raises(OelmError, match=r"Call applied\.unfreeze_until_step\(\) before"):
        applied.step(STEPS, STEPS)
    assert applied.step(STEPS, STEPS, rewraps=True)


def test_tensors_are_trainable_until_the_next_step():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2)
    applied = oelm.apply(model, "oelm-gradual", seed=0)
    frozen = applied.frozen
    assert len(applied.unfreeze_until_step()) > 0
    assert applied.frozen == 0 < frozen
    applied.step(0, STEPS)
    assert applied.frozen == frozen
    assert oelm.audit(model).ok
