"""The audit of optimizers: what they hold, what they miss, and what they do to frozen tensors."""

import pytest
import torch
from tiny_models import applied_model, build, faults, outputs
from torch import nn
from transformers import Adafactor

import oelm
from oelm.errors import UsageError


class Lion(torch.optim.Optimizer):
    """The state is one tensor per parameter; like some Muons, it can decay parameters without a gradient."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0, decays_without_gradient=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.decays_without_gradient = decays_without_gradient

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None and not self.decays_without_gradient:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if p.grad is not None:
                    momentum = self.state.get(p, torch.zeros_like(p)).lerp(p.grad, 0.1)
                    self.state[p] = momentum
                    p.sub_(group["lr"] * momentum.sign())


HOW_TO_BUILD = "Build the optimizer after oelm.apply, from oelm.param_groups"

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, scale_parameter=False, relative_step=False),
    "lion": Lion,
    "schedule-free": lambda groups: pytest.importorskip("schedulefree").AdamWScheduleFree(groups),
    "muon-and-adamw": lambda groups: (
        torch.optim.Muon([{**g, "params": matrices} for g in groups if (matrices := _split(g, True))]),
        torch.optim.AdamW([{**g, "params": others} for g in groups if (others := _split(g, False))]),
    ),
}


def _split(group, matrices):
    return [p for p in group["params"] if (p.ndim == 2) == matrices]


def step(model, optimizers):
    outputs(model).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_tensors_do_not_change_and_all_others_train(kind, monkeypatch):
    # Muon orthogonalises its update with bf16 matmuls, which kill the process on some CPUs.
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda update, *_: update.sign())
    model = applied_model("gpt2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = OPTIMIZERS[kind](oelm.param_groups(model, lr=1e-2, weight_decay=0.1))
    optimizers = made if isinstance(made, tuple) else (made,)
    for optimizer in optimizers:
        getattr(optimizer, "train", lambda: None)()  # schedule-free optimizers have two modes
    for _ in range(2):
        step(model, optimizers)
    report = oelm.audit(model, made)
    assert report.ok, report
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad), name
        assert p.requires_grad == any(p in optimizer.state for optimizer in optimizers), name


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_an_optimizer_that_decays_without_a_gradient_is_reported(decay):
    model = applied_model("gpt2")
    optimizer = Lion(model.parameters(), weight_decay=decay, decays_without_gradient=True)
    step(model, [optimizer])
    found = faults(oelm.audit(model, optimizer))
    query = next(name for name in found if name.endswith("c_attn.q.weight"))
    assert "the optimizer contains it" in found[query]
    assert ("its bytes changed" in found[query]) == bool(decay)
    assert all(".c_attn.q." in name or ".c_attn.k." in name for name in found)


def test_an_optimizer_state_may_be_a_tensor():
    model = applied_model("gpt2")
    optimizer = Lion(model.parameters())
    query = model.transformer.h[0].attn.c_attn.q.weight
    optimizer.state[query] = torch.zeros_like(query)
    assert (
        "keeps state for it" in faults(oelm.audit(model, optimizer))["transformer.h.0.attn.c_attn.q.weight"]
    )


@pytest.mark.parametrize("family", ["gpt2", "torch-encoder"])
def test_an_optimizer_built_before_apply_holds_too_much_and_too_little(family):
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters())
    oelm.apply(model, "oelm-freeze")
    report = oelm.audit(model, optimizer)
    found = faults(report)
    values = {name for name, p in model.named_parameters() if ".v." in name or "v_proj_" in name}
    assert len(values) == 6  # a weight and a bias in each of three layers
    assert {name for name in found if "will not train" in found[name]} == values
    gone = [name for name in found if name.startswith("optimizer group 0, parameter")]
    assert len(gone) == 6
    assert all("the model changed after the optimizer was built" in found[name] for name in gone)
    assert str(report).count(HOW_TO_BUILD) == 1
    assert oelm.audit(model, torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))).ok


def test_a_parameter_left_out_of_the_optimizer_is_a_fault_unless_it_was_frozen_before_apply():
    def without_embeddings(model):
        return torch.optim.AdamW(
            [p for n, p in model.named_parameters() if "wte" not in n and p.requires_grad]
        )

    model = applied_model("gpt2")
    assert faults(oelm.audit(model, without_embeddings(model))) == {
        "transformer.wte.weight": "the optimizer does not contain it, so it will not train"
    }
    model = build("gpt2")
    model.transformer.wte.requires_grad_(False)
    oelm.apply(model, "oelm-freeze")
    assert oelm.audit(model, without_embeddings(model)).ok


def test_an_optimizer_without_a_tensor_that_is_unfrozen_later_is_reported():
    model = applied_model("bert", "oelm-gradual")
    assert oelm.audit(model, torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))).ok
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    found = faults(oelm.audit(model, optimizer))
    assert len(found) == 12  # weight and bias of q and k in three layers
    assert all("will not train when it is unfrozen" in fault for fault in found.values())
    assert HOW_TO_BUILD in str(oelm.audit(model, optimizer))


def test_state_of_a_tensor_that_is_unfrozen_later_does_not_ask_for_another_optimizer():
    model = applied_model("gpt2", "oelm-gradual")
    optimizer = torch.optim.AdamW(oelm.param_groups(model, lr=1e-3))
    optimizer.state[model.transformer.h[0].attn.c_attn.q.weight] = {"step": torch.ones(1)}
    report = oelm.audit(model, optimizer)
    (fault,) = faults(report).values()
    assert "applied.step(..., optimizer) deletes that state" in fault
    assert HOW_TO_BUILD not in str(report)


def test_a_long_report_is_shortened_only_when_printed():
    model = applied_model("gpt2")
    report = oelm.audit(model, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {name for name in faults(report) if not name.startswith("optimizer")} == set(trainable)
    assert f"... and {len(trainable) + 1 - 20} more" in str(report)
    assert HOW_TO_BUILD in str(report)


def test_an_object_that_is_not_an_optimizer_is_refused():
    with pytest.raises(UsageError, match="str is not an optimizer"):
        oelm.audit(applied_model("gpt2"), ["adamw"])


def test_an_optimizer_wrapped_by_accelerate_is_audited():
    from accelerate import Accelerator

    model = applied_model("gpt2")
    accelerator = Accelerator(cpu=True)
    groups = oelm.param_groups(model, lr=1e-3)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups))
    assert oelm.audit(prepared, optimizer).ok
