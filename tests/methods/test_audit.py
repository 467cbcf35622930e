"""Each fault that the audit must find."""

import json

import pytest
import torch
from tiny_models import applied_model, build, faults, outputs
from torch import nn

import oelm


@pytest.fixture
def model():
    return applied_model("gpt2")


def first_query(model):
    return oelm.qk_projections(model)[0].weight.parameter


def audit_faults(model, optimizer=None):
    """Return all faults that the audit finds, as one text."""
    report = oelm.audit(model, optimizer)
    assert not report.ok
    return " ".join(faults(report).values())


def test_an_intact_model_passes(model):
    report = oelm.audit(model, torch.optim.AdamW(oelm.param_groups(model, lr=1e-3)))
    assert report.ok
    assert "ok" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert len(report.rows) == 12


def test_a_thawed_tensor(model):
    first_query(model).requires_grad_(True)
    assert "unfroze" in audit_faults(model)


def test_a_frozen_tensor_in_the_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters())
    assert "optimizer contains it, with weight decay" in audit_faults(model, optimizer)
    assert "Build the optimizer after oelm.apply" in str(oelm.audit(model, optimizer))


def test_a_tensor_changed_by_weight_decay(model):
    query = first_query(model)
    query.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    outputs(model).sum().backward()
    query.grad.zero_()  # a masked gradient does not stop weight decay
    optimizer.step()
    query.requires_grad_(False)
    found = audit_faults(model, optimizer)
    assert "bytes changed" in found
    assert "applies weight decay to it" in found
    assert "keeps state" in found


def test_a_tensor_changed_in_its_last_bit(model):
    with torch.no_grad():
        query = first_query(model)
        query[0, 0] = torch.nextafter(query[0, 0], torch.tensor(9.0))
    assert "bytes changed" in audit_faults(model)


def test_heads_that_are_not_orthonormal(model):
    with torch.no_grad():
        first_query(model).mul_(torch.linspace(1, 2, 32)[:, None])
    assert "not orthonormal" in audit_faults(model)


def test_a_weight_tied_to_a_frozen_one():
    llama = applied_model("llama")
    attention = llama.model.layers[1].self_attn
    attention.o_proj.weight = attention.q_proj.weight
    assert "frozen by accident" in audit_faults(llama)


def test_a_tensor_that_the_method_did_not_freeze(model):
    model.transformer.ln_f.weight.requires_grad_(False)
    assert "the method does not freeze it" in audit_faults(model)


def test_a_gradient_on_a_frozen_tensor(model):
    query = first_query(model)
    query.grad = torch.zeros_like(query)
    assert "has a gradient" in audit_faults(model)


def test_an_extra_that_the_optimizer_does_not_hold():
    model = applied_model("own-gpt", "oelm-plus")
    forgetful = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if "extra_bias" not in n and p.requires_grad]
    )
    assert "will not train" in audit_faults(model, forgetful)


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-lowrank"])
def test_a_projection_that_was_replaced_after_apply(name, tmp_path):
    """As adapters do. The audit reports it; functions that need the tensor raise an error."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

    model = build("llama")
    applied = oelm.apply(model, name)
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    assert "another module replaced it" in audit_faults(model)
    for use in (lambda: applied.step(5, 10), lambda: oelm.save(model, tmp_path)):
        with pytest.raises(
            oelm.OelmError, match=r"layers\.1\.self_attn\.q_proj\.\w+ is not in the model any more"
        ):
            use()


def test_a_model_without_a_method():
    with pytest.raises(oelm.OelmError, match=r"oelm\.apply first"):
        oelm.audit(nn.MultiheadAttention(8, 2))


def test_an_attention_layer_added_after_apply():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32) for _ in range(2))
    oelm.apply(layers, "oelm-freeze")
    assert oelm.audit(layers).ok
    layers.append(nn.TransformerEncoderLayer(16, 4, 32))
    report = oelm.audit(layers)
    assert not report.ok
    assert {row.tensor for row in report.rows if not row.ok} == {
        "2.self_attn.q.weight",
        "2.self_attn.k.weight",
    }
    assert "after oelm.apply" in str(report)
