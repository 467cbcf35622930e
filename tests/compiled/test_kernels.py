"""Causal attention, GELU and cross-entropy by our own C++ code, against those of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import oelm
from oelm import compiled
from oelm.models.gpt import GPT, GPTConfig, rotary_table, rotate

pytestmark = pytest.mark.skipif(
    compiled.library() is None,
    reason="oelm was installed without a C++ compiler",
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The instruction sets of kernels.cpp that this CPU can run.
SETS = {512: [512, 256], 256: [256], 128: [128]}[compiled.instruction_set()] if compiled.library() else []


@pytest.fixture(params=SETS)
def each_instruction_set(request, monkeypatch):
    monkeypatch.setattr(compiled, "instruction_set", lambda: request.param)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, rotation: Tensor | None) -> Tensor:
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("size", compiled.HEAD_SIZES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 37, 128, 300])
@pytest.mark.usefixtures("each_instruction_set")
def test_outputs_and_gradients_are_those_of_torch_in_double_precision(tokens, size, rotary):
    draw = torch.Generator().manual_seed(tokens)
    *qkv, g = torch.randn(4, 2, tokens, 3, size, generator=draw, dtype=torch.float64)
    shape = GPTConfig(context=tokens, width=3 * size, heads=3)
    table = rotary_table(shape) if rotary else None
    ours, exact = ([x.to(dtype).requires_grad_() for x in qkv] for dtype in (torch.float32, torch.float64))
    y = compiled.attention(*ours, table)
    expected = torch_attention(*exact, table)
    y.backward(g.float())
    expected.backward(g)
    for a, b in ((y, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = 100 * torch.randn(3, 1, 20, 1, 8, generator=torch.Generator().manual_seed(0))
    y = compiled.attention(q, k, v, None)
    torch.testing.assert_close(y.double(), torch_attention(q.double(), k.double(), v.double(), None))


def test_a_token_sees_no_later_one_however_low_its_scores_are():
    q = torch.full((1, 6, 1, 8), 1e17)
    v = torch.randn(1, 6, 1, 8, generator=torch.Generator().manual_seed(0))
    y = compiled.attention(q, -q, v, None)
    torch.testing.assert_close(y, torch_attention(q, -q, v, None))
    torch.testing.assert_close(y[:, 0], v[:, 0])


def test_a_nan_reaches_the_tokens_that_see_it_and_no_others():
    q, k, v = torch.randn(3, 1, 8, 1, 8, generator=torch.Generator().manual_seed(0))
    k[0, 5] = float("nan")
    y = compiled.attention(q, k, v, None)[0, :, 0]
    assert y[:5].isfinite().all()
    assert y[5:].isnan().all()


@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5, 64), (3, 8192)])
@pytest.mark.usefixtures("each_instruction_set")
def test_gelu_and_its_gradient_are_those_of_torch_in_double_precision(shape):
    exact = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact.requires_grad_()
    x = exact.detach().float()
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = F.gelu(exact)
    (expected_gradient,) = torch.autograd.grad(expected, exact, g)
    y, derivative = compiled.gelu_and_derivative(x)
    again, gradient = compiled.gelu_and_gradient(x, g.float())
    assert torch.equal(y, again)
    torch.testing.assert_close(y.double(), expected, atol=4e-7, rtol=1e-6)
    torch.testing.assert_close(derivative.double() * g, expected_gradient, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=4e-7, rtol=1e-6)


def test_gelu_of_extreme_numbers():
    x = torch.tensor([0.0, -0.0, 1e-30, 50.0, -50.0, 1e20, -1e20, float("inf"), float("nan")])
    expected = torch.tensor([0.0, -0.0, 5e-31, 50.0, -0.0, 1e20, -0.0, float("inf"), float("nan")])
    y, _ = compiled.gelu_and_derivative(x)
    torch.testing.assert_close(y, expected, equal_nan=True)  # torch's GELU of infinity may be nan


def test_gelu_of_a_tensor_that_is_not_contiguous():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).t()
    y, _ = compiled.gelu_and_derivative(x)
    torch.testing.assert_close(y, F.gelu(x))


def cross_entropy_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.full((len(logits), logits.shape[1] + 3), 7.0)  # rows with space between them
    rows[:, :-3] = logits
    losses, factors = compiled.cross_entropy(rows[:, :-3], targets)
    assert torch.equal(rows[:, -3:], torch.full((len(logits), 3), 7.0))
    return losses, factors[:, None] * rows[:, :-3]


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize("vocabulary", [1, 7, 16, 1031])
@pytest.mark.usefixtures("each_instruction_set")
def test_cross_entropy_and_its_gradient_are_those_of_torch_in_double_precision(vocabulary, scale):
    draw = torch.Generator().manual_seed(vocabulary)
    logits = scale * torch.randn(9, vocabulary, generator=draw, dtype=torch.float64)
    targets = torch.randint(vocabulary, (9,), generator=draw)
    targets[3] = -100
    losses, gradient = cross_entropy_and_gradient(logits.float(), targets)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none")
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(losses.double(), expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("each_instruction_set")
def test_cross_entropy_of_extreme_logits():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1e30, -1e30, 0.0], [-inf, 0.0, 0.0], [0.0, nan, 1.0], [0.0, inf, 1.0]])
    targets = torch.tensor([0, 1, 0, 2])
    losses, gradient = cross_entropy_and_gradient(logits, targets)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected, equal_nan=True)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient[:2], expected_gradient[:2])
    assert gradient[2:].isnan().any(1).all()


@pytest.mark.parametrize("target", [-1, 4, 2**40])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    with pytest.raises(IndexError, match="out of bounds for 4 tokens"):
        compiled.cross_entropy(torch.zeros(2, 4), torch.tensor([0, target]))


def model_and_ids(position: str = "rope") -> tuple[GPT, Tensor]:
    config = GPTConfig(vocab_size=11, context=24, width=32, layers=2, heads=4, ff=32, position=position)
    draw = torch.Generator().manual_seed(0)
    return GPT(config, draw), torch.randint(0, 11, (2, 25), generator=draw)


def gradients(model: GPT, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_gpt_has_the_same_gradients_with_and_without_it(monkeypatch):
    model, ids = model_and_ids()
    used = []
    for name in ("attention", "gelu_and_derivative", "cross_entropy"):
        real = getattr(compiled, name)
        monkeypatch.setattr(compiled, name, lambda *a, real=real: used.append(real) or real(*a))
    ours = gradients(model, ids)
    assert len(used) == 2 * 2 + 1  # two in each of two layers, and one loss
    monkeypatch.setattr(compiled, "library", lambda: None)
    for a, b in zip(ours, gradients(model, ids), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    assert len(used) == 2 * 2 + 1


@pytest.mark.usefixtures("each_instruction_set")
def test_two_threads_give_the_same_bits_as_one():
    if not compiled.library().oelm_has_threads():
        pytest.skip("torch has no OpenMP library with GOMP_parallel here")
    draw = torch.Generator().manual_seed(0)
    *qkv, g = torch.randn(4, 4, 70, 5, 16, generator=draw)
    x = torch.randn(10**5, generator=draw)
    logits, targets = torch.randn(70, 999, generator=draw), torch.randint(999, (70,), generator=draw)

    def compute(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        parts = [part.clone().requires_grad_() for part in qkv]
        y = compiled.attention(*parts, None)
        losses = cross_entropy_and_gradient(logits, targets)
        return [y, *torch.autograd.grad(y, parts, g), *compiled.gelu_and_gradient(x, x.clone()), *losses]

    for one, two in zip(compute(1), compute(2), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("has_threads", [True, False])
def test_several_threads_need_the_openmp_library_of_torch(monkeypatch, has_threads):
    monkeypatch.setattr(compiled, "library", lambda: SimpleNamespace(oelm_has_threads=lambda: has_threads))
    assert compiled.runs_gelu(torch.zeros(8))
    torch.set_num_threads(2)
    assert compiled.runs_gelu(torch.zeros(8)) == has_threads


def test_long_rows_are_left_to_torch():
    assert compiled.runs_attention(*torch.zeros(3, 1, compiled.MAX_TOKENS, 1, 8))
    assert not compiled.runs_attention(*torch.zeros(3, 1, compiled.MAX_TOKENS + 1, 1, 8))


def test_keys_or_values_of_another_size_are_left_to_torch():
    q, k, v = torch.zeros(3, 1, 8, 1, 16)
    assert not compiled.runs_attention(q, k[..., :8], v)
    assert not compiled.runs_attention(q, k, v.double())


def test_a_rotary_table_in_another_precision_is_converted(monkeypatch):
    model, ids = model_and_ids()
    model.rotation = model.rotation.bfloat16()
    ours = model(ids[:, :-1])
    monkeypatch.setattr(compiled, "library", lambda: None)
    torch.testing.assert_close(ours, model(ids[:, :-1]))


def hessian_part(model: GPT, ids: Tensor) -> Tensor:
    """The derivative of gradients of one weight by another; some paths between them avoid the attention."""
    loss = model(ids[:, :-1]).square().mean()
    (first,) = torch.autograd.grad(loss, model.blocks[0].attn.v.weight, create_graph=True)
    return torch.autograd.grad(first.square().sum(), model.tokens.weight)[0]


def test_second_derivatives_are_an_error_that_names_the_way_to_compute_them():
    model, ids = model_and_ids()
    with pytest.raises(RuntimeError, match=r"SDPBackend\.MATH"):
        hessian_part(model, ids)
    with sdpa_kernel(SDPBackend.MATH):
        assert hessian_part(model, ids).abs().max() > 0


def test_it_works_with_torch_func_and_checkpointing(monkeypatch):
    model, ids = model_and_ids(position="learned")
    parameters = dict(model.named_parameters())

    def mean_square(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (ids[:, :-1],)).square().mean()

    def with_checkpoints() -> Tensor:
        hidden = model.tokens(ids[:, :-1]) + model.positions.weight
        for block in model.blocks:
            hidden = checkpoint(block, hidden, None, None, use_reentrant=False)
        return model.norm(hidden).square().mean()

    functional = torch.func.grad(mean_square)(parameters)
    recomputed = torch.autograd.grad(with_checkpoints(), list(parameters.values()))
    monkeypatch.setattr(compiled, "library", lambda: None)
    expected = torch.autograd.grad(mean_square(parameters), list(parameters.values()))
    for a, b, c in zip(functional.values(), recomputed, expected, strict=True):
        torch.testing.assert_close(a, c, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(b, c, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "found",
    [
        {"oelm_version": lambda: compiled.VERSION, "oelm_instruction_set": lambda: 0},
        {"oelm_version": lambda: compiled.VERSION - 1, "oelm_instruction_set": lambda: 512},
        {"oelm_instruction_set": lambda: 512},
    ],
)
def test_a_library_that_this_cpu_cannot_run_or_of_an_old_version_is_not_used(monkeypatch, found):
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda path: SimpleNamespace(**found))
    assert compiled.library.__wrapped__() is None


def test_oelm_reads_the_queries_and_keys_of_a_gpt_that_would_use_it():
    model, _ = model_and_ids()
    assert oelm.apply(model, "oelm-freeze", seed=0).frozen == 2 * 2 * 32 * 32


def test_a_mode_that_records_operations_sees_those_of_torch():
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    model, ids = model_and_ids()
    names: list[str] = []
    with Recorder():
        model(ids[:, :-1])
    assert any("attention" in name for name in names)
