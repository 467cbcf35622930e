"""GELU and a linear layer in one operation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oelm import compiled
from oelm.models.gelu import gelu_linear, recomputed_gelu_linear


@pytest.mark.parametrize("function", [gelu_linear, recomputed_gelu_linear])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("has_compiler", [True, False])
def test_its_gradients_are_those_of_plain_autograd(monkeypatch, function, trained, has_compiler):
    if not has_compiler:
        monkeypatch.setattr(compiled, "library", lambda: None)
    layer = nn.Linear(6, 4)
    layer.requires_grad_(trained)
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    g = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    plain = layer(F.gelu(x))
    wanted = [x, *layer.parameters()] if trained else [x]
    expected = torch.autograd.grad(plain, wanted, g)
    ours = function(x, layer)
    torch.testing.assert_close(ours, plain)
    for a, b in zip(torch.autograd.grad(ours, wanted, g), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("recomputed", [1, 2**21])
def test_a_layer_of_another_class_or_with_a_hook_is_called(monkeypatch, recomputed):
    """For example the low-rank adapter of another library around the layer."""
    monkeypatch.setattr("oelm.models.gelu.RECOMPUTED", recomputed)
    layer, x = nn.Linear(6, 4), torch.ones(2, 6)
    twice = nn.Sequential(layer, nn.Linear(4, 4))
    assert torch.equal(gelu_linear(x, twice), twice(F.gelu(x)))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(gelu_linear(x, layer), layer(F.gelu(x)))


def test_a_large_layer_stores_no_gelu(monkeypatch):
    monkeypatch.setattr("oelm.models.gelu.RECOMPUTED", 12)
    stored = []
    x = torch.randn(2, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: stored.append(tensor.shape) or tensor, lambda t: t
    ):
        gelu_linear(x, nn.Linear(6, 4))
    assert stored == [(2, 6), (4, 6)]  # x and the weight
