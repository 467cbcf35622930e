"""oelm never runs a bf16 matmul on a user's bf16 model: the guard in tests/conftest.py raises if it does."""

import pytest
import torch
from tiny_models import build, equal_parameters

import oelm
from oelm.errors import OelmError
from oelm.methods.presets import methods


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_works_on_a_bf16_model(name, tmp_path):
    model = build("own-gpt").bfloat16()
    applied = oelm.apply(model, name, seed=1)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    oelm.param_groups(model, lr=1e-3, weight_decay=0.1)
    assert oelm.audit(model).ok
    assert str(applied)
    oelm.save(model, tmp_path)
    assert equal_parameters(model, oelm.load(tmp_path))
    if any(
        part in extra
        for extra in dict(model.named_parameters())
        for part in (".conv", "relative_bias", "extra_bias")
    ):
        with pytest.raises(OelmError, match="cannot be folded into a plain model"):
            oelm.folded_state(model)
    else:
        assert oelm.folded_state(model).keys() == build("own-gpt").state_dict().keys()


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_pretrained_bf16_weights_are_orthonormalised_in_double_precision(family):
    model = build(family).bfloat16()
    oelm.apply(model, oelm.Method("qr of the trained rows", init="qr", freeze="all"), seed=1)
    for projection in oelm.qk_projections(model):
        heads = projection.heads().double()
        assert torch.allclose(heads @ heads.mT, torch.eye(projection.head_dim).double(), atol=0.02)
