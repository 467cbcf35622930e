"""Matrix products by our own C++ code, against those of numpy in double precision."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from oelm import compiled
from oelm.compiled import products
from oelm.compiled.products import FEWEST_ROWS, SMALLEST, linear, product
from oelm.methods.extras.kernels import lowrank_linear
from oelm.methods.reading.verify import kind_of_module
from oelm.models.gelu import gelu_linear, recomputed_gelu_linear
from oelm.models.gpt import GPT, GPTConfig


def can_run() -> bool:
    """Whether this CPU has the instructions. The products may still be no faster than torch's."""
    if compiled.library() is None or compiled.instruction_set() != 512:
        return False
    return torch.get_num_threads() == 1 or bool(compiled.library().oelm_has_threads())


needs_avx512 = pytest.mark.skipif(
    not can_run(), reason="no C++ compiler at the installation, no AVX-512, or another OpenMP library"
)


@pytest.fixture
def own(monkeypatch):
    """Use our products on every CPU that can run them, and also for small matrices."""
    monkeypatch.setattr(products, "available", lambda: True)
    monkeypatch.setattr(products, "FEWEST_ROWS", 1)
    monkeypatch.setattr(products, "SMALLEST", 1)
    used = []
    real = products._compute
    monkeypatch.setattr(products, "_compute", lambda *args: used.append(args) or real(*args))
    return used


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_product(result: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> None:
    """Assert that `result` is a @ b + start up to the rounding errors of a sum in fp32."""
    exact = a.double().numpy() @ b.double().numpy()
    bound = np.abs(a.double().numpy()) @ np.abs(b.double().numpy())
    if start is not None:
        exact, bound = exact + start.double().numpy(), bound + start.abs().double().numpy()
    assert (np.abs(result.double().numpy() - exact) <= 1e-5 * bound).all()


# Sizes around those of a tile (14 x 32), of a vector (16), and of a block (1,024 deep, 2,048 wide).
SIZES = [1, 2, 13, 14, 15, 16, 31, 32, 33, 100]


@needs_avx512
@pytest.mark.parametrize("layout", ["plain", "a transposed", "b transposed", "both transposed", "strided"])
@pytest.mark.usefixtures("own")
def test_products_are_those_of_double_precision(layout):
    shapes = [(m, k, n) for m in SIZES for k in SIZES for n in SIZES]
    shapes += [(40, 1025, 33), (40, 2100, 2049), (500, 33, 40), (30, 1024, 2080), (1500, 1024, 35)]
    for m, k, n in shapes[:: 7 if layout == "strided" else 3] + shapes[-5:]:
        a, b = draw(m, k), draw(k, n, seed=1)
        if layout in ("a transposed", "both transposed"):
            a = a.T.contiguous().T
        if layout in ("b transposed", "both transposed"):
            b = b.T.contiguous().T
        if layout == "strided":
            a, b = draw(m, 2, k, 3)[:, 1, :, 2], draw(k, n + 5)[:, 2 : n + 2]
        assert_product(product(a, b), a, b)
        out = draw(m, n + 3, seed=2)
        before = out.clone()
        product(a, b, out=out[:, 1 : n + 1], add=True)
        assert_product(out[:, 1 : n + 1], a, b, before[:, 1 : n + 1])
        out[:, 1 : n + 1] = before[:, 1 : n + 1]
        assert torch.equal(out, before)  # nothing was written beside the result


@needs_avx512
def test_rows_of_a_that_share_lines_of_the_cache(own):
    a, b = draw(60, 1024), draw(1024, 40, seed=1)
    assert_product(product(a, b), a, b)
    assert_product(product(draw(60, 3072)[:, 1000:1500], b[:500]), draw(60, 3072)[:, 1000:1500], b[:500])
    assert len(own) == 2


@needs_avx512
@pytest.mark.usefixtures("own")
def test_any_number_of_threads_gives_the_same_bits():
    if not compiled.library().oelm_has_threads():
        pytest.skip("torch has no OpenMP library with GOMP_parallel here")
    before = torch.get_num_threads()
    shapes = [(200, 300, 90), (90, 1100, 2500), (3, 40, 64), (700, 20, 3)]
    try:
        results = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append([product(draw(m, k), draw(k, n, seed=1)) for m, k, n in shapes])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@needs_avx512
def test_numbers_that_are_not_finite_stay_in_their_row_and_column(own):
    a, b = draw(50, 20), draw(20, 40, seed=1)
    a[3, 4], b[5, 39] = float("nan"), float("inf")
    result = product(a, b)
    expected = a @ b
    assert torch.equal(result.isfinite(), expected.isfinite())
    assert own


@needs_avx512
@pytest.mark.parametrize("shape", [(60, 24), (3, 20, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_the_gradients_of_torch(own, shape, bias):
    layer = nn.Linear(24, 37, bias=bias)
    x = draw(*shape).requires_grad_()
    g = draw(*shape[:-1], 37, seed=1)
    wanted = [x, *layer.parameters()]
    ours, expected = products.call_linear(layer, x), F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert len(own) == 3


@needs_avx512
def test_a_frozen_weight_costs_no_product(own):
    layer = nn.Linear(24, 37).requires_grad_(False)
    products.call_linear(layer, draw(60, 24).requires_grad_()).sum().backward()
    assert len(own) == 2
    assert layer.weight.grad is None


@needs_avx512
@pytest.mark.usefixtures("own")
def test_second_derivatives_are_those_of_torch():
    def second(of) -> Tensor:
        x, weight = draw(60, 24).requires_grad_(), draw(37, 24, seed=1).requires_grad_()
        (first,) = torch.autograd.grad(of(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    torch.testing.assert_close(second(linear), second(F.linear), rtol=1e-4, atol=1e-3)


@needs_avx512
def test_what_our_products_cannot_compute_is_left_to_torch(monkeypatch, own):
    monkeypatch.setattr(products, "FEWEST_ROWS", FEWEST_ROWS)
    monkeypatch.setattr(products, "SMALLEST", SMALLEST)
    many = draw(FEWEST_ROWS, SMALLEST)
    cases = [
        (many[1:], many.T),  # few rows
        (many[:, 1:], many.T[1:]),  # few summands
        (many, many.T[:, : SMALLEST - 1]),  # few columns
        (many.double(), many.T.double()),
        (many.to(torch.complex64), many.T.to(torch.complex64)),
    ]
    for a, b in cases:
        assert torch.equal(product(a, b), a @ b)
    out = torch.zeros(len(many), len(many), dtype=torch.float64)
    product(many, many.T, out=out)
    assert torch.equal(out, (many @ many.T).double())
    product(many, many.T, out=out.T, add=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        assert torch.equal(product(many, many.T), many @ many.T)
    with pytest.raises(RuntimeError, match="shape"):
        product(many, many)
    assert not own
    product(many, many.T)
    assert len(own) == 1


@needs_avx512
def test_a_mode_that_records_operations_sees_those_of_torch(own):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Recorder():
        products.call_linear(nn.Linear(24, 37), draw(60, 24))
    assert not own
    assert any("addmm" in name for name in names)


@needs_avx512
def test_a_gpt_has_the_same_gradients_with_and_without_them(monkeypatch, own):
    config = GPTConfig(vocab_size=67, context=24, width=32, layers=2, heads=4, ff=64, position="rope")
    model = GPT(config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 67, (4, 25), generator=torch.Generator().manual_seed(1))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        return [p.grad.clone() for p in model.parameters()]

    ours = gradients()
    assert len(own) == 2 * 6 * 3 + 3  # six linear layers in each of two blocks, and the LM head
    monkeypatch.setattr(products, "available", lambda: False)
    for a, b in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@needs_avx512
@pytest.mark.parametrize("rank", [2, 20])
def test_adapters_have_the_gradients_of_torch(own, rank):
    x, g = draw(4, 20, 48).requires_grad_(), draw(4, 20, 64, seed=1)
    shapes = ((64, 48), (64,), (rank, 48), (64, rank))
    weight, bias, a, b = (draw(*shape, seed=2 + i).requires_grad_() for i, shape in enumerate(shapes))
    wanted = [x, weight, bias, a, b]
    ours = lowrank_linear(x, weight, bias, a, b, 0.5)
    expected = F.linear(x, weight + 0.5 * b @ a, bias)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-5)
    pairs = zip(torch.autograd.grad(ours, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True)
    for found, want in pairs:
        torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-4)
    assert own


@needs_avx512
@pytest.mark.parametrize("function", [gelu_linear, recomputed_gelu_linear])
def test_gelu_and_a_linear_layer_have_the_gradients_of_torch(own, function):
    layer, x, g = nn.Linear(48, 64), draw(60, 48).requires_grad_(), draw(60, 64, seed=1)
    wanted = [x, *layer.parameters()]
    ours, expected = function(x, layer), F.linear(F.gelu(x), layer.weight, layer.bias)
    pairs = zip(torch.autograd.grad(ours, wanted, g), torch.autograd.grad(expected, wanted, g), strict=True)
    for found, want in pairs:
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)
    assert len(own) == 3


@needs_avx512
def test_the_result_may_be_changed_in_place(own):
    layer, x = nn.Linear(24, 37), draw(4, 20, 24)
    ours, expected = products.call_linear(layer, x).mul_(2), F.linear(x, layer.weight, layer.bias).mul_(2)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert own


@needs_avx512
@pytest.mark.parametrize("bias", [torch.tensor(2.0), torch.tensor([2.0]), draw(60, 37, seed=2)])
def test_a_bias_of_another_shape_is_left_to_torch(own, bias):
    x, weight = draw(60, 24), draw(37, 24, seed=1)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.T + bias)
    assert not own


@needs_avx512
def test_an_output_of_the_wrong_shape_is_left_to_torch(own):
    out = torch.zeros(10, 64)
    with pytest.warns(UserWarning, match="resized"):
        product(draw(64, 32), draw(32, 64, seed=1), out=out)
    assert_product(out, draw(64, 32), draw(32, 64, seed=1))
    assert not own


@needs_avx512
def test_tensors_with_another_kind_of_memory_are_left_to_torch(own):
    z, b = torch.complex(draw(60, 24), draw(60, 24, seed=1)), draw(24, 37, seed=2)
    a = z.conj().imag  # the sign is in a bit of the tensor, not in its memory
    torch.testing.assert_close(product(a, b), -z.imag @ b)
    torch.testing.assert_close(product(draw(60, 24).to_sparse(), b), draw(60, 24) @ b)
    assert not own


def test_a_layer_is_plain_only_if_calling_it_does_nothing_else():
    layer = nn.Linear(24, 37)
    assert products.is_plain_linear(layer)
    for register in (
        lambda: layer.register_forward_hook(lambda *args: None),
        lambda: layer.register_forward_pre_hook(lambda *args: None),
        lambda: layer.register_full_backward_hook(lambda *args: None),
        lambda: layer.register_full_backward_pre_hook(lambda *args: None),
        lambda: nn.modules.module.register_module_forward_hook(lambda *args: None),
    ):
        handle = register()
        assert not products.is_plain_linear(layer)
        handle.remove()
        assert products.is_plain_linear(layer)
    layer.forward = lambda x: x
    assert not products.is_plain_linear(layer)
    assert not products.is_plain_linear(nn.Identity())


@needs_avx512
def test_only_what_the_backward_pass_needs_is_kept(own):
    def kept(layer: nn.Linear, x: Tensor) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t
        ):
            products.call_linear(layer, x)
        return shapes

    x = draw(60, 24)
    assert kept(nn.Linear(24, 37), x.clone().requires_grad_()) == [(60, 24), (37, 24)]
    assert kept(nn.Linear(24, 37), x) == [(60, 24)]
    assert kept(nn.Linear(24, 37).requires_grad_(False), x.clone().requires_grad_()) == [(37, 24)]
    assert own


@needs_avx512
def test_it_works_with_forward_mode_and_with_several_gradients_at_once(own):
    x, weight, tangent = draw(60, 24), draw(37, 24, seed=1).requires_grad_(), draw(60, 24, seed=2)
    with torch.autograd.forward_ad.dual_level():
        y = linear(torch.autograd.forward_ad.make_dual(x, tangent), weight)
        found = torch.autograd.forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(found, tangent @ weight.T, atol=1e-5, rtol=1e-5)
    g = draw(2, 60, 37, seed=3)
    (both,) = torch.autograd.grad(linear(x, weight), weight, g, is_grads_batched=True)
    torch.testing.assert_close(both, torch.stack([part.T @ x for part in g]), atol=1e-5, rtol=1e-5)


@needs_avx512
def test_torch_compile_sees_no_call_of_the_library(own):
    """Without a break of the graph: torch.compile cannot follow calls of compiled libraries."""
    layer, x = nn.Linear(24, 37), draw(60, 24)
    whole = torch.compile(lambda x: linear(x, layer.weight, layer.bias), backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(x), layer(x))
    assert not own


@needs_avx512
@pytest.mark.usefixtures("own")
def test_long_sums_are_as_exact_as_those_of_torch():
    a, b = draw(64, 40_000), draw(40_000, 32, seed=1)
    exact = a.double() @ b.double()
    ours, theirs = ((result.double() - exact).square().mean().sqrt() for result in (product(a, b), a @ b))
    assert ours < 3 * theirs


@needs_avx512
def test_models_of_other_libraries_use_them_and_keep_their_hooks(own):
    model = nn.TransformerEncoderLayer(24, 2, 37, dropout=0.0, batch_first=True)
    x = draw(4, 20, 24)
    expected = model(x)
    products.speed_up_linear_layers(model)
    seen = []
    handle = model.linear1.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert seen == [(4, 20, 37)]
    assert len(own) == 2  # torch's attention computes its projections itself
    handle.remove()
    assert pickle.loads(pickle.dumps(model.linear1))(x).shape == (4, 20, 37)
    pair = nn.ModuleList([nn.Linear(24, 37), nn.Linear(24, 37)])
    products.speed_up_linear_layers(pair)
    assert kind_of_module(pair[0]) == kind_of_module(pair[1])  # what is read in one layer holds for the other
    twin = copy.deepcopy(model)
    twin.linear1.weight.data.zero_()
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert twin.linear1(x).abs().max() <= twin.linear1.bias.abs().max()


def test_without_a_library_torch_computes(monkeypatch):
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert not products.available.__wrapped__()
    monkeypatch.setattr(products, "available", lambda: False)
    a, b = draw(60, 24), draw(24, 37, seed=1)
    assert torch.equal(product(a, b), a @ b)
    assert torch.equal(linear(a, b.T), F.linear(a, b.T))
