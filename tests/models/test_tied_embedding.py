"""The gradient of the tied weight equals that of plain autograd."""

import pytest
import torch
import torch.nn.functional as F

from oelm.models.gpt import GPT, gpt_config


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_gradient_of_the_tied_weight_equals_plain_autograd(micro_batches):
    model = GPT(gpt_config("smoke", vocab_size=23, context=12), seeded())
    ids = torch.randint(23, (4, 13), generator=seeded(2))
    for part in ids.chunk(micro_batches):
        model.loss(part[:, :-1], part[:, 1:], reduction="sum").backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model.logits(ids[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    for name, p in model.named_parameters():
        assert torch.allclose(ours[name], p.grad, atol=1e-4), name


@pytest.mark.parametrize(
    "kind",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_the_embedding_run_in_training(kind):
    model = GPT(gpt_config("smoke", vocab_size=23, context=12), seeded())
    ids = torch.randint(23, (4, 13), generator=seeded(2))
    calls = []
    getattr(model.tokens, kind)(lambda *values: calls.append(values))
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert len(calls) == 1


def test_hooks_of_all_modules_run_for_the_embedding_in_training():
    model = GPT(gpt_config("smoke", vocab_size=23, context=12), seeded())
    ids = torch.randint(23, (4, 13), generator=seeded(2))
    called = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        model.loss(ids[:, :-1], ids[:, 1:])
    finally:
        hook.remove()
    assert model.tokens in called
