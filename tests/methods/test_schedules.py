"""oelm.apply with schedules: gradual unfreezing, early freezing, and resumed runs."""

import copy
import dataclasses

import pytest
import torch
from tiny_models import build, equal_parameters, frozen_layers, optimizer_of, outputs

import oelm
from oelm.errors import UsageError
from oelm.methods.presets import find_method


@pytest.mark.parametrize("family", ["bert", "gpt2", "torch-encoder"])
def test_gradual_thaws_from_the_top_and_depends_on_the_position_alone(family):
    model = build(family)
    applied = oelm.apply(model, "oelm-gradual", seed=1)  # between 20 % and 80 %
    seen, changes = [], []
    for step in range(11):
        changes.append(applied.step(step, 10))
        seen.append({layer for _, layer in frozen_layers(model)})
    assert seen == [{0, 1, 2}] * 2 + [{0, 1}] * 3 + [{0}] * 3 + [set()] * 3
    assert [i for i, changed in enumerate(changes) if changed] == [2, 5, 8]
    fresh = build(family)
    resumed = oelm.apply(fresh, "oelm-gradual", seed=1)
    assert resumed.step(6, 10)
    assert {layer for _, layer in frozen_layers(fresh)} == {0}
    assert not resumed.step(6, 10)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_thawed_tensors_train_and_frozen_ones_have_no_optimizer_state(family):
    model = build(family)
    applied = oelm.apply(model, "oelm-gradual", seed=1)
    optimizer = optimizer_of(model)
    layout = [len(g["params"]) for g in optimizer.param_groups]
    for step in range(10):
        applied.step(step, 10, optimizer)
        weights = {p.name: p.heads().clone() for p in oelm.qk_projections(model)}
        optimizer.zero_grad()
        outputs(model).square().mean().backward()
        optimizer.step()
        for p in oelm.qk_projections(model):
            parameter = p.weight.parameter
            assert torch.equal(p.heads(), weights[p.name]) != parameter.requires_grad
            assert (parameter in optimizer.state) == parameter.requires_grad
        assert oelm.audit(model, optimizer).ok
    assert layout == [len(g["params"]) for g in optimizer.param_groups]


def test_a_resumed_run_with_a_schedule_ends_bit_equal():
    def train(start, stop, model, applied, optimizer):
        for step in range(start, stop):
            applied.step(step, 10, optimizer)
            optimizer.zero_grad()
            outputs(model).square().mean().backward()
            optimizer.step()

    def fresh(name):
        model = build("gpt2")
        applied = oelm.apply(model, name, seed=1)
        return model, applied, optimizer_of(model)

    for name in ("oelm-gradual", "oelm-early"):
        uninterrupted = fresh(name)
        train(0, 10, *uninterrupted)
        for cut in (2, 6):
            part, resumed = fresh(name), fresh(name)
            train(0, cut, *part)
            resumed[0].load_state_dict(part[0].state_dict())
            resumed[2].load_state_dict(copy.deepcopy(part[2].state_dict()))
            train(cut, 10, *resumed)
            assert equal_parameters(uninterrupted[0], resumed[0])
            assert oelm.audit(resumed[0], resumed[2]).ok


def test_early_trains_then_freezes_and_drops_the_optimizer_state():
    model = build("bert")
    applied = oelm.apply(model, dataclasses.replace(find_method("oelm-early"), freeze_at=0.5), seed=1)
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-2))
    assert applied.frozen == 0
    outputs(model).square().mean().backward()
    optimizer.step()
    weight = oelm.qk_projections(model)[0].weight.parameter
    assert weight in optimizer.state
    applied.step(5, 10, optimizer)
    assert applied.qk_trainable == 0
    assert weight not in optimizer.state
    assert weight.grad is None
    assert oelm.audit(model, optimizer).ok


@pytest.mark.parametrize("position", [(-1, 10), (11, 10), (0, 0)])
def test_a_position_outside_the_run_is_refused(position):
    applied = oelm.apply(build("bert"), "oelm-gradual")
    with pytest.raises(UsageError, match="must be between 0 and total_steps"):
        applied.step(*position)
