"""The chunked loss has the value and gradients of plain cross-entropy for every chunk size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.models import loss as loss_module
from oelm.models.loss import IGNORE, cross_entropy_each, cross_entropy_sum


def problem(tokens, vocabulary, scale, seed, ignored):
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(tokens, 12, generator=g)).requires_grad_()
    weight = torch.randn(vocabulary, 12, generator=g).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=g)
    targets[torch.rand(tokens, generator=g) < ignored] = IGNORE
    return hidden, weight, targets


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 50),
    rows=st.integers(1, 50),
    scale=st.sampled_from([0.1, 1.0, 40.0]),  # 40: probabilities underflow in fp32
    ignored=st.sampled_from([0.0, 0.3]),
    factor=st.sampled_from([1.0, 0.25]),
)
def test_equals_plain_cross_entropy(tokens, vocabulary, rows, scale, ignored, factor):
    hidden, weight, targets = problem(tokens, vocabulary, scale, tokens * 53 + vocabulary, ignored)
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")
    (factor * plain).backward()
    expected = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "CHUNK_ELEMENTS", rows * vocabulary)
        ours = cross_entropy_sum(hidden, weight, targets)
        (factor * ours).backward()
        with torch.no_grad():
            quiet = cross_entropy_sum(hidden, weight, targets)
        each = cross_entropy_each(hidden, weight, targets)
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-4)
    assert torch.allclose(quiet, plain, rtol=1e-5, atol=1e-4)
    plain_each = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="none")
    assert torch.allclose(each, plain_each, rtol=1e-5, atol=1e-4)
    for got, want in zip((hidden.grad, weight.grad), expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max() + 1))


def test_only_required_gradients_are_computed():
    hidden, weight, targets = problem(6, 9, 1.0, seed=0, ignored=0.0)
    cross_entropy_sum(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None
    hidden.grad = None
    cross_entropy_sum(hidden.detach(), weight, targets).backward()
    assert weight.grad is not None
    assert hidden.grad is None


def test_a_second_backward_pass_is_an_error():
    hidden, weight, targets = problem(6, 9, 1.0, seed=0, ignored=0.0)
    total = cross_entropy_sum(hidden, weight, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        total.backward()


def test_a_second_derivative_is_an_error_and_not_wrong():
    hidden, weight, targets = problem(5, 7, 1.0, 0, 0.0)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(cross_entropy_sum(hidden, weight, targets), hidden, create_graph=True)


@pytest.mark.parametrize("wrong", [-1, 9])
@pytest.mark.parametrize("training", [True, False])
def test_a_target_outside_the_vocabulary_is_an_error(wrong, training):
    hidden, weight, targets = problem(6, 9, 1.0, seed=0, ignored=0.0)
    targets[2] = wrong
    with torch.set_grad_enabled(training), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy_sum(hidden, weight, targets)


def test_torch_compile_does_not_trace_the_loss():
    """Inductor fails on softmax with out= at the size of GPT-2's vocabulary."""
    traced = []

    def backend(graph, _inputs):
        traced.append(graph.code)
        return graph.forward

    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.arange(6)
    compiled = torch.compile(lambda h: cross_entropy_sum(h * 2, weight, targets) * 3, backend=backend)
    loss = compiled(hidden)
    assert torch.allclose(loss, 3 * cross_entropy_sum(hidden * 2, weight, targets))
    loss.backward()
    assert hidden.grad is not None
    assert traced
    assert not any("softmax" in code for code in traced)


def test_scratch_memory_made_in_inference_mode_or_on_meta_is_not_reused():
    hidden, weight, targets = problem(5, 9, 1.0, 0, 0.0)
    want = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets, reduction="sum"), (hidden, weight))
    for used in (torch.inference_mode(), torch.device("meta")):
        loss_module._kept.memory = None
        with used, torch.enable_grad():
            loss_module._scratch(64, torch.float32, torch.device("cpu"))
        found = torch.autograd.grad(cross_entropy_sum(hidden, weight, targets), (hidden, weight))
        assert all(torch.allclose(f, w, atol=1e-5) for f, w in zip(found, want, strict=True))


def test_targets_of_another_dtype_or_number_are_an_error():
    hidden, weight, targets = problem(6, 9, 1.0, seed=0, ignored=0.0)
    with pytest.raises(TypeError, match=r"must be int64, not torch\.int32"):
        cross_entropy_sum(hidden, weight, targets.int())
    for loss in (cross_entropy_sum, cross_entropy_each):
        with pytest.raises(ValueError, match="6 hidden states do not match"):
            loss(hidden, weight, targets[:5])


def test_no_targets_give_a_loss_and_gradients_of_zero():
    hidden, weight, targets = problem(0, 9, 1.0, seed=0, ignored=0.0)
    total = cross_entropy_sum(hidden, weight, targets)
    total.backward()
    assert total.item() == 0
    assert not weight.grad.any()
