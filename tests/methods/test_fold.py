"""Extras folded into plain matrices: transformers, which knows nothing of them, is the oracle."""

from dataclasses import replace

import pytest
import torch
from tiny_models import build, outputs

import oelm
from oelm.errors import OelmError
from oelm.methods.registry import method

FOLDABLE = ["oelm-freeze", "oelm-lowrank", "oelm-core", "oelm-temperature"]
ALL_AT_ONCE = replace(method("oelm-core"), name="all", lowrank=2, lowrank_scale=3, temperature=True)


def trained(family, wish):
    """As after training: no extra at its start, no bias at zero."""
    model = build(family).eval()
    oelm.apply(model, wish, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.rpartition(".")[2] in ("lowrank_a", "lowrank_b", "core", "temperature", "bias"):
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.5)
    return model


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])  # biases, fused and transposed, grouped keys
@pytest.mark.parametrize("wish", [*FOLDABLE, ALL_AT_ONCE], ids=lambda w: getattr(w, "name", w))
def test_transformers_loads_what_the_extended_model_computes(tmp_path, family, wish):
    model = trained(family, wish)
    want, before = outputs(model), {n: t.clone() for n, t in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=oelm.folded_state(model))
    plain, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(outputs(plain.eval()), want, atol=1e-4)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())  # the model itself stays


@pytest.mark.parametrize("wish", ["oelm-conv", "oelm-plus"])
def test_what_no_matrix_holds_is_refused_by_name(wish):
    with pytest.raises(OelmError, match=r"no plain matrix can hold: .*\.conv"):
        oelm.folded_state(trained("llama", wish))


def test_a_model_without_a_method_is_its_own_state():
    model = build("bert")
    assert oelm.folded_state(model).keys() == model.state_dict().keys()
