"""Extras folded into plain matrices: plain transformers must compute the same."""

import itertools
from dataclasses import replace

import pytest
import torch
from tiny_models import build, outputs, trained_model

import oelm
from oelm.errors import OelmError
from oelm.methods.extras.extended import EXTRAS
from oelm.methods.presets import find_method

FOLDABLE = ["oelm-freeze", "oelm-lowrank", "oelm-core", "oelm-temperature"]
ALL_AT_ONCE = replace(find_method("oelm-core"), name="all", lowrank=2, lowrank_scale=3, temperature=True)
WITH_BIAS = replace(ALL_AT_ONCE, name="all with biases", bias=True, bias_scale=3, lowrank=(4, 1))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *itertools.product(["bert", "gpt2", "gpt2-cross", "llama"], [*FOLDABLE, ALL_AT_ONCE]),
        *itertools.product(["bert", "gpt2", "gpt-neox", "qwen2"], ["oelm-plus", WITH_BIAS]),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_transformers_computes_the_same_from_the_folded_state(tmp_path, family, method):
    model = trained_model(family, method)
    want, before = outputs(model), {n: t.clone() for n, t in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=oelm.folded_state(model))
    if method != "oelm-freeze":
        bare = {n: t for n, t in model.state_dict().items() if n.rpartition(".")[2] not in EXTRAS}
        plain = build(family)
        plain.load_state_dict(bare)
        assert (outputs(plain.eval()) - want).abs().max() > 1e-2  # without the extras the output differs
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(outputs(plain.eval()), want, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())  # the model is unchanged


@pytest.mark.parametrize(("method", "extra"), [("oelm-conv", "conv"), ("oelm-bias", "extra_bias")])
def test_an_extra_that_the_plain_model_has_no_place_for_cannot_be_folded(method, extra):
    message = rf"cannot be folded into a plain model: .*\.{extra}.* oelm\.save"
    with pytest.raises(OelmError, match=message):
        oelm.folded_state(trained_model("llama", method))
    model = build("llama")
    oelm.apply(model.model, method)  # the outer model has no record
    with pytest.raises(OelmError, match=message):
        oelm.folded_state(model)


def test_folding_keeps_float64_exactly():
    model = build("llama").double()
    oelm.apply(model, "oelm-temperature")
    state, own = oelm.folded_state(model), model.state_dict()
    assert all(torch.equal(t, own[n]) for n, t in state.items())


def test_a_model_without_a_method_folds_to_its_state_dict():
    model = build("bert")
    assert oelm.folded_state(model).keys() == model.state_dict().keys()
