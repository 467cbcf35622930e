"""The audit catches what it exists to catch."""

import json

import pytest
import torch
from tiny_models import build, outputs
from torch import nn

import oelm


@pytest.fixture
def model():
    model = build("gpt2")
    oelm.apply(model, "oelm-freeze", seed=1)
    return model


def first_query(model):
    return oelm.qk_projections(model)[0].weight.parameter


def faults(report):
    assert not report.ok
    return " ".join(fault for row in report.rows for fault in row.faults)


def test_all_is_well(model):
    report = oelm.audit(model, torch.optim.AdamW(oelm.param_groups(model, lr=1e-3)))
    assert report.ok
    assert "ok" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert len(report.rows) == 12


def test_a_thawed_tensor(model):
    first_query(model).requires_grad_(True)
    assert "thawed" in faults(oelm.audit(model))


def test_a_frozen_tensor_in_the_optimizer(model):
    assert "optimizer holds it, with weight decay" in faults(
        oelm.audit(model, torch.optim.AdamW(model.parameters()))
    )


def test_a_tensor_changed_by_weight_decay(model):
    query = first_query(model)
    query.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    outputs(model).sum().backward()
    query.grad.zero_()  # a masked gradient: decay moves the tensor all the same
    optimizer.step()
    query.requires_grad_(False)
    found = faults(oelm.audit(model, optimizer))
    assert "bytes changed" in found
    assert "decays it" in found
    assert "keeps state" in found


def test_a_tensor_changed_by_one_bit_of_its_last_place(model):
    with torch.no_grad():
        query = first_query(model)
        query[0, 0] = torch.nextafter(query[0, 0], torch.tensor(9.0))
    assert "bytes changed" in faults(oelm.audit(model))


def test_heads_that_are_not_orthonormal(model):
    with torch.no_grad():
        first_query(model).mul_(torch.linspace(1, 2, 32)[:, None])
    assert "not orthonormal" in faults(oelm.audit(model))


def test_a_weight_tied_to_a_frozen_one(model):
    llama = build("llama")
    oelm.apply(llama, "oelm-freeze")
    attention = llama.model.layers[1].self_attn
    attention.o_proj.weight = attention.q_proj.weight
    assert "frozen by accident" in faults(oelm.audit(llama))


def test_a_tensor_frozen_by_someone_else(model):
    model.transformer.ln_f.weight.requires_grad_(False)
    assert "not by the method" in faults(oelm.audit(model))


def test_a_gradient_on_a_frozen_tensor(model):
    query = first_query(model)
    query.grad = torch.zeros_like(query)
    assert "has a gradient" in faults(oelm.audit(model))


def test_an_extra_that_the_optimizer_forgot():
    model = build("own-gpt")
    oelm.apply(model, "oelm-plus")
    forgetful = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if "conv" not in n and p.requires_grad]
    )
    assert "will not train" in faults(oelm.audit(model, forgetful))


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-lowrank"])
def test_a_projection_that_something_replaced(name, tmp_path):
    """As adapters do: the audit says so, and what would need the tensor refuses with a word."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

    model = build("llama")
    applied = oelm.apply(model, name)
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    assert "it is gone" in faults(oelm.audit(model))
    for use in (lambda: applied.step(5, 10), lambda: oelm.save(model, tmp_path)):
        with pytest.raises(oelm.OelmError, match=r"layers\.1\.self_attn\.q_proj\.\w+ is gone since"):
            use()


def test_a_model_without_a_method():
    with pytest.raises(oelm.OelmError, match=r"oelm\.apply first"):
        oelm.audit(nn.MultiheadAttention(8, 2))
