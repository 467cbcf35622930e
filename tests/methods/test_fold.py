"""Extras folded into plain matrices: transformers, which knows nothing of them, is the oracle."""

from dataclasses import replace

import pytest
import torch
from tiny_models import build, outputs

import oelm
from oelm.errors import OelmError
from oelm.methods.extras.extended import EXTRAS
from oelm.methods.presets import find_method

FOLDABLE = ["oelm-freeze", "oelm-lowrank", "oelm-core", "oelm-temperature"]
ALL_AT_ONCE = replace(find_method("oelm-core"), name="all", lowrank=2, lowrank_scale=3, temperature=True)


def trained(family, wish):
    """As after training: no extra at its start, no bias at zero."""
    model = build(family).eval()
    oelm.apply(model, wish, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            if name.rpartition(".")[2] in ("lowrank_a", "lowrank_b", "core", "temperature", "bias"):
                p.add_(noise * 0.5)
            elif p.dim() == 2 and p.requires_grad:
                p.add_(noise * 0.3)  # a fresh model's values are too small for attention to matter
    return model


@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt2-cross", "llama"])  # biases, fused, Conv1D, grouped
@pytest.mark.parametrize("wish", [*FOLDABLE, ALL_AT_ONCE], ids=lambda w: getattr(w, "name", w))
def test_transformers_loads_what_the_extended_model_computes(tmp_path, family, wish):
    model = trained(family, wish)
    want, before = outputs(model), {n: t.clone() for n, t in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=oelm.folded_state(model))
    if wish != "oelm-freeze":
        bare = {n: t for n, t in model.state_dict().items() if n.rpartition(".")[2] not in EXTRAS}
        plain = build(family)
        plain.load_state_dict(bare)
        assert (outputs(plain.eval()) - want).abs().max() > 1e-2  # extras that were left behind would show
    plain, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(outputs(plain.eval()), want, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())  # the model itself stays


@pytest.mark.parametrize("wish", ["oelm-conv", "oelm-plus"])
def test_what_no_matrix_holds_is_refused_by_name(wish):
    with pytest.raises(OelmError, match=r"no plain matrix can hold what .*\.conv"):
        oelm.folded_state(trained("llama", wish))
    model = build("llama")
    oelm.apply(model.model, wish)  # of a part, so that the whole carries no record
    with pytest.raises(OelmError, match=r"no plain matrix can hold what .*\.conv"):
        oelm.folded_state(model)


def test_doubles_stay_doubles():
    model = build("llama").double()
    oelm.apply(model, "oelm-temperature")
    state, own = oelm.folded_state(model), model.state_dict()
    assert all(torch.equal(t, own[n]) for n, t in state.items())


def test_a_model_without_a_method_is_its_own_state():
    model = build("bert")
    assert oelm.folded_state(model).keys() == model.state_dict().keys()
