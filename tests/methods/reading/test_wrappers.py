"""Wrapped models, copies, other devices and dtypes."""

import copy
import io
import pickle

import pytest
import torch
from tiny_models import applied_model, build, equal_parameters, optimizer_of, outputs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import oelm
from oelm.errors import OelmError, UsageError

WRAPPERS = {
    "data-parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled-in-data-parallel": lambda model: nn.DataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_model_is_audited_and_saved_like_the_plain_one(kind, tmp_path):
    model = applied_model("gpt2")
    wrapped = WRAPPERS[kind](model)
    optimizer = optimizer_of(wrapped)
    report = oelm.audit(wrapped, optimizer)
    assert report.ok, report
    assert len(oelm.qk_projections(wrapped)) == len(oelm.qk_projections(model))
    assert [row.tensor for row in report.rows] == [row.tensor for row in oelm.audit(model).rows]
    oelm.save(wrapped, tmp_path)
    assert torch.equal(outputs(oelm.load(tmp_path)), outputs(model))


def test_a_model_can_be_wrapped_before_apply():
    model = build("gpt2")
    wrapped = torch.compile(nn.DataParallel(model))
    oelm.apply(wrapped, "oelm-freeze", seed=1)
    assert equal_parameters(model, applied_model("gpt2"))
    assert oelm.audit(model, optimizer_of(wrapped)).ok


def test_wrapped_and_compiled_layers_keep_their_names():
    model = applied_model("llama", "oelm-gradual")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = torch.compile(model.model.layers[1])
    optimizer = optimizer_of(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}  # also the tensors that thaw later
    assert oelm.audit(model, optimizer).ok
    oelm.Applied(model).step(9, 10, optimizer)
    assert oelm.audit(model, optimizer).ok


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["mean", "ema"])
def test_an_averaged_model_is_audited(average):
    model = applied_model("llama")
    averaged = AveragedModel(model, multi_avg_fn=average)
    optimizer = optimizer_of(model)
    for _ in range(3):
        outputs(model).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    report = oelm.audit(averaged)
    assert report.ok, report
    assert report.frozen == oelm.audit(model).frozen


@pytest.mark.parametrize("family", ["gpt2", "torch-encoder"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copied_model_has_its_own_record(family, how):
    model = applied_model(family, "oelm-gradual")
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(outputs(other), outputs(model))
    oelm.Applied(other).step(9, 10)
    assert oelm.audit(other, optimizer_of(other)).ok
    assert oelm.Applied(model).progress == 0.0
    assert oelm.audit(model).ok
    other.load_state_dict(model.state_dict())  # the hooks of the copy act on the copy
    assert equal_parameters(model, other)


@pytest.mark.parametrize("name", ["oelm-freeze", "oelm-lowrank", "oelm-plus"])
def test_a_state_dict_loads_strictly(name):
    model, other = applied_model("gpt2", name), applied_model("gpt2", name)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    other.load_state_dict(model.state_dict(), strict=True)
    assert equal_parameters(model, other)
    if name == "oelm-freeze":
        build("gpt2").load_state_dict(model.state_dict(), strict=True)


def test_a_default_device_other_than_the_cpu_does_not_matter():
    model, want = build("llama"), applied_model("llama", "oelm-plus")
    torch.set_default_device("meta")  # a user with a GPU would set "cuda"
    try:
        oelm.apply(model, "oelm-plus", seed=1)
        assert oelm.audit(model).ok
    finally:
        torch.set_default_device(None)
    assert equal_parameters(model, want)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hooks_of_a_replaced_module_are_still_called(family):
    model, seen = build(family), []
    name = oelm.qk_projections(model)[0].name.removesuffix(".q")
    model.get_submodule(name).register_forward_hook(lambda *_: seen.append("output"))
    handle = model.get_submodule(name).register_full_backward_hook(lambda *_: seen.append("gradient"))
    oelm.apply(model, "oelm-lowrank")
    assert not seen
    outputs(model).sum().backward()
    assert seen == ["output", "gradient"]
    oelm.remove(model)
    handle.remove()
    outputs(model).sum().backward()
    assert seen == ["output", "gradient", "output"]


@pytest.mark.parametrize("nothing", [None, "bert-base-uncased", {}])
def test_an_object_that_is_not_a_model_is_refused(nothing, tmp_path):
    uses = (
        lambda: oelm.apply(nothing, "oelm-freeze"),
        lambda: oelm.audit(nothing),
        lambda: oelm.param_groups(nothing, lr=1.0),
        lambda: oelm.qk_projections(nothing),
        lambda: oelm.save(nothing, tmp_path),
        lambda: oelm.folded_state(nothing),
    )
    for use in uses:
        with pytest.raises(UsageError, match=r"model must be a torch\.nn\.Module, got"):
            use()


def test_a_model_on_the_meta_device_is_refused(tmp_path):
    model = applied_model("gpt2").to("meta")
    for use in (lambda: oelm.audit(model), lambda: oelm.save(model, tmp_path)):
        with pytest.raises(OelmError, match="meta device"):
            use()


def test_the_audit_names_a_cast_as_the_reason():
    report = oelm.audit(applied_model("llama").double())
    assert not report.ok
    assert "it is float64: cast the model before oelm.apply" in str(report)
    model = build("llama").double()
    oelm.apply(model, "oelm-freeze")
    assert oelm.audit(model).ok


def test_gradient_checkpointing_keeps_tensors_frozen():
    model = applied_model("llama").train()
    model.gradient_checkpointing_enable()
    outputs(model).square().mean().backward()
    assert oelm.audit(model, optimizer_of(model)).ok
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_method_on_a_submodule_is_reported():
    model = build("llama")
    oelm.apply(model.model, "oelm-freeze")
    with pytest.raises(OelmError, match="pass its submodule 'model'"):
        oelm.audit(model)
    with pytest.raises(OelmError, match="already applied to the submodule 'model'"):
        oelm.apply(model, "oelm-freeze")
