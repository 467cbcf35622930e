"""oelm.remove gives the plain model back; oelm.disabled switches the extras off."""

import copy

import pytest
import torch
from tiny_models import applied_model, build, optimizer_of, outputs, trained_model
from torch import nn

import oelm
from oelm.errors import OelmError

FOLDABLE = [
    ("bert", "oelm-freeze"),
    ("gpt2", "oelm-freeze"),
    ("gpt2", "oelm-lowrank"),
    ("llama", "oelm-core"),
    ("falcon", "oelm-temperature"),
    ("t5", "oelm-ffn"),
    ("own-gpt", "oelm-lowrank"),
    ("torch-encoder", "oelm-freeze"),
    ("torch-attention-unpacked", "oelm-gradual"),
    ("gpt2", "orthogonal-init"),
]


def shape_of(model):
    """Everything about a model that remove must restore, but for the values of its tensors."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")
    return (
        [(name, type(module), set(module.__dict__)) for name, module in model.named_modules()],
        [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()],
        [len(getattr(module, kind)) for module in model.modules() for kind in hooks],
        list(model.state_dict()),
    )


@pytest.mark.parametrize(("family", "method"), FOLDABLE)
def test_remove_restores_the_plain_model_and_keeps_what_it_computes(family, method):
    plain, model = build(family), trained_model(family, method)
    want, state = outputs(model), oelm.folded_state(model)
    assert oelm.remove(model) is model
    assert shape_of(model) == shape_of(plain)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(outputs(model), want, rtol=1e-4, atol=5e-5)
    with pytest.raises(OelmError, match="no method was applied"):
        oelm.audit(model)
    again = oelm.apply(model, "oelm-freeze", seed=3)
    assert oelm.audit(model, optimizer_of(model)).ok
    assert again.qk_trainable == 0


def test_frozen_weights_are_kept_and_train_again():
    model = applied_model("gpt2")
    weights = [p.heads().clone() for p in oelm.qk_projections(model)]
    oelm.remove(model)
    assert all(torch.equal(p.heads(), w) for p, w in zip(oelm.qk_projections(model), weights, strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs(model).square().mean().backward()
    optimizer.step()
    assert not any(
        torch.equal(p.heads(), w) for p, w in zip(oelm.qk_projections(model), weights, strict=True)
    )


@pytest.mark.parametrize("family", ["gpt2", "bert", "torch-encoder"])
def test_what_the_user_froze_before_apply_stays_frozen(family):
    model = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    before = shape_of(model)
    oelm.apply(model, "oelm-freeze")
    assert shape_of(oelm.remove(model)) == before


def test_a_removed_method_cannot_freeze_the_model_again():
    model = build("bert")
    applied = oelm.apply(model, "oelm-early")
    oelm.remove(model)
    with pytest.raises(OelmError, match="was removed from the model"):
        applied.step(10, 10)
    assert all(p.requires_grad for p in model.parameters())


def test_a_copy_and_a_loaded_model_can_be_removed_too(tmp_path):
    model = trained_model("gpt2", "oelm-lowrank")
    oelm.save(model, tmp_path)
    want = outputs(model)
    for other in (copy.deepcopy(model), oelm.load(tmp_path)):
        oelm.remove(other)
        assert shape_of(other)[1:] == shape_of(build("gpt2"))[1:]
        torch.testing.assert_close(outputs(other), want, rtol=1e-4, atol=5e-5)
    assert oelm.audit(model).ok  # the original still has its method


def test_transformers_saves_the_plain_model_after_remove(tmp_path):
    model = trained_model("llama", "oelm-lowrank")
    oelm.remove(model)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("oelm*"))
    assert torch.equal(outputs(type(model).from_pretrained(tmp_path)), outputs(model))


@pytest.mark.parametrize(("family", "method"), [("llama", "oelm-conv"), ("own-gpt", "oelm-relative")])
def test_what_cannot_be_folded_is_refused_or_dropped(family, method):
    model = trained_model(family, method)
    with pytest.raises(OelmError, match=r"cannot be folded into the plain model.*fold=False"):
        oelm.remove(model)
    assert oelm.audit(model).ok
    oelm.remove(model, fold=False)
    assert shape_of(model) == shape_of(build(family))
    if family == "llama":
        assert model.config.use_cache
        assert outputs(model).isfinite().all()


def test_wrapped_models_are_removed_inside():
    model = applied_model("bert")
    assert oelm.remove(nn.DataParallel(model)) is model
    assert shape_of(model) == shape_of(build("bert"))


@pytest.mark.parametrize("method", ["oelm-lowrank", "oelm-conv", "oelm-relative"])
def test_disabled_computes_without_the_extras_inside_the_block_only(method):
    model, without = trained_model("own-gpt", method), applied_model("own-gpt", "oelm-freeze")
    extras = set(dict(model.named_parameters())) - set(dict(without.named_parameters()))
    without.load_state_dict({n: t for n, t in model.state_dict().items() if n not in extras})
    want = outputs(model)
    with oelm.disabled(model):
        torch.testing.assert_close(outputs(model), outputs(without))
        assert not torch.allclose(outputs(model), want)
    assert torch.equal(outputs(model), want)
    assert oelm.audit(model, optimizer_of(model)).ok
    with pytest.raises(RuntimeError, match="stop"), oelm.disabled(model):
        raise RuntimeError("stop")
    assert torch.equal(outputs(model), want)


def test_in_a_disabled_block_nothing_loses_the_extras(tmp_path):
    model = trained_model("own-gpt", "oelm-lowrank")
    want = outputs(model)
    with oelm.disabled(model):
        with oelm.disabled(model):
            pass
        for call in (oelm.audit, oelm.remove, lambda m: oelm.save(m, tmp_path)):
            with pytest.raises(OelmError, match=r"outside the `with oelm\.disabled"):
                call(model)
    torch.testing.assert_close(outputs(oelm.remove(model)), want, rtol=1e-4, atol=5e-5)
