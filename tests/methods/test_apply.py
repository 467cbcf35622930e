"""`oelm.apply`: invalid arguments, initialisation, what is frozen, and schedules."""

import dataclasses
import warnings

import pytest
import torch
from tiny_models import applied_model, build, frozen_layers, optimizer_of
from torch import nn

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.method import Method
from oelm.methods.presets import find_method


@pytest.mark.parametrize("seed", [True, "1", -1, 1.0, None])
def test_a_seed_must_be_a_non_negative_integer(seed):
    with pytest.raises(UsageError, match="seed must be a non-negative integer"):
        oelm.apply(build("bert"), "oelm-freeze", seed=seed)


def test_a_model_without_attention_is_refused():
    with pytest.raises(OelmError, match="found no query and key projections"):
        oelm.apply(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "oelm-freeze")
    with pytest.raises(OelmError, match="no linear layers"):
        oelm.apply(nn.Conv2d(3, 3, 3), "oelm-freeze")


def test_a_second_method_is_refused():
    model = build("bert")
    oelm.apply(model, "baseline")
    with pytest.raises(OelmError, match="method 'baseline' was already applied"):
        oelm.apply(model, "oelm-freeze")


def test_a_method_that_would_freeze_nothing_is_refused():
    nothing = dataclasses.replace(find_method("oelm-partial"), layers=3)
    with pytest.raises(OelmError, match="freeze nothing"):
        oelm.apply(build("bert"), nothing)


def test_the_same_seed_gives_the_same_tensors_and_q_differs_from_k():
    first, second, other = (applied_model("bert", seed=seed) for seed in (1, 1, 2))
    a, b, c = ([p.heads() for p in oelm.qk_projections(m)] for m in (first, second, other))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))
    assert len({x.flatten()[0].item() for x in a}) == len(a)


def test_apply_does_not_touch_the_global_random_generator():
    model = build("gpt2")
    state = torch.get_rng_state()
    oelm.apply(model, "oelm-freeze", seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_gain_match_keeps_the_norm_of_each_head():
    model = build("gpt-neox")
    before = [p.heads().flatten(1).norm(dim=1) for p in oelm.qk_projections(model)]
    oelm.apply(model, "oelm-pretrained")
    after = [p.heads().flatten(1).norm(dim=1) for p in oelm.qk_projections(model)]
    assert all(torch.allclose(x, y, rtol=1e-5) for x, y in zip(before, after, strict=True))


def test_discarding_pretrained_weights_gives_a_warning(tmp_path):
    model = build("bert")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="freeze-pretrained"):
        oelm.apply(loaded, "oelm-freeze")
    with pytest.warns(UserWarning, match="replaces the trained FFN weights"):
        oelm.apply(type(model).from_pretrained(tmp_path), "oelm-ffn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oelm.apply(type(model).from_pretrained(tmp_path), "oelm-pretrained")
        oelm.apply(type(model).from_pretrained(tmp_path), "freeze-pretrained")
        oelm.apply(build("bert"), "oelm-freeze")  # it was not loaded from a checkpoint


@pytest.mark.parametrize(
    ("freeze", "n", "layers"), [("first", 1, {0}), ("first", 9, {0, 1, 2}), ("all-but-last", 1, {0, 1})]
)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_first_and_all_but_last_choose_the_right_layers(family, freeze, n, layers):
    model = build(family)
    oelm.apply(model, Method("mine", init="headwise", freeze=freeze, layers=n))
    assert {layer for _, layer in frozen_layers(model)} == layers


def test_encoder_and_decoder_count_their_own_layers():
    model = build("bart")
    oelm.apply(model, Method("mine", freeze="first", layers=1))
    assert frozen_layers(model) == {("model.encoder.layers", 0), ("model.decoder.layers", 0)}
    cross = [p for p in oelm.qk_projections(model) if "encoder_attn" in p.name and p.place.layer == 0]
    assert cross
    assert not any(p.weight.parameter.requires_grad for p in cross)


def test_keys_alone_can_be_frozen():
    model = build("gpt2")
    oelm.apply(model, Method("keys", init="headwise", parts=("k",), freeze="all"))
    for p in oelm.qk_projections(model):
        assert p.weight.parameter.requires_grad == (p.role == "q")
    assert oelm.audit(model).ok


def test_tensors_that_the_user_froze_stay_frozen():
    model = build("gpt2")
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    applied = oelm.apply(model, "oelm-freeze")
    assert applied.trainable == model.lm_head.weight.numel()
    assert oelm.audit(model).ok


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-early"])
def test_no_schedule_trains_what_the_user_froze(name, tmp_path):
    model = build("llama")
    frozen = model.model.layers[0].requires_grad_(False).self_attn.q_proj.weight
    applied = oelm.apply(model, name)
    optimizer = optimizer_of(model)
    assert frozen not in {p for group in optimizer.param_groups for p in group["params"]}
    oelm.save(model, tmp_path)
    for run in (applied, oelm.Applied(oelm.load(tmp_path))):
        for done in range(11):
            run.step(done, 10)
            assert not run.model.model.layers[0].self_attn.q_proj.weight.requires_grad
            assert oelm.audit(run.model).ok


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "torch-encoder"])
def test_splitting_a_fused_tensor_keeps_requires_grad_of_v(family):
    """If only biases train (BitFit), or only matrices, then V's part of a fused tensor does the same."""
    for trained in ("bias", "weight"):
        model = build(family)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        oelm.apply(model, "oelm-freeze")
        qk = {
            id(window.parameter)
            for p in oelm.qk_projections(model)
            for window in (p.weight, p.bias)
            if window is not None
        }
        rest = {n: p.requires_grad for n, p in model.named_parameters() if id(p) not in qk}
        assert rest == {name: name.endswith(trained) for name in rest}
