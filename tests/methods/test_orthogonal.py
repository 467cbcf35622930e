"""Mathematical properties of the inits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import OelmError
from oelm.methods import orthogonal

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(12, 40))  # heads, head_dim <= d_in
SEEDS = st.integers(0, 2**40)
RANDOM = ["headwise", "global", "normal", "normal-matched"]


def eye_error(w):
    gram = w @ w.mT
    return float((gram - torch.eye(w.shape[-2], dtype=w.dtype)).abs().max())


def before(shape, seed=7):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(SHAPES, SEEDS)
def test_headwise_rows_are_orthonormal_within_each_head(shape, seed):
    assert eye_error(orthogonal.headwise(*shape, orthogonal.generator_for(seed, "w"))) < 1e-12


@settings(deadline=None, max_examples=40)
@given(SHAPES, SEEDS)
def test_global_rows_or_columns_are_orthonormal_across_heads(shape, seed):
    w = orthogonal.across_heads(*shape, orthogonal.generator_for(seed, "w")).reshape(-1, shape[2])
    assert eye_error(w if w.shape[0] <= w.shape[1] else w.mT) < 1e-12


@settings(deadline=None, max_examples=30)
@given(SHAPES, SEEDS, st.sampled_from(["qr", "polar"]))
def test_rows_made_from_weights_are_orthonormal_and_span_the_same_space(shape, seed, init):
    w = before(shape, seed % 1000)
    new = orthogonal.init_weight(init, 1.0, w, None)
    assert eye_error(new) < 1e-9
    projected = (w @ new.mT) @ new  # onto the new row space
    assert torch.allclose(projected, w, atol=1e-8)


@settings(deadline=None, max_examples=20)
@given(SHAPES, st.floats(0.01, 100))
def test_orthonormal_rows_stay_as_they_are(shape, scale):
    w = orthogonal.headwise(*shape, orthogonal.generator_for(3, "w"))
    for init in ("qr", "polar"):
        assert torch.allclose(orthogonal.init_weight(init, 1.0, scale * w, None), w, atol=1e-9)


def test_polar_gives_the_nearest_orthonormal_rows():
    w = before((3, 6, 20))
    nearest, by_qr = (orthogonal.init_weight(init, 1.0, w, None) for init in ("polar", "qr"))
    rivals = [by_qr, *(orthogonal.headwise(3, 6, 20, orthogonal.generator_for(s, "w")) for s in range(20))]
    for rival in rivals:
        assert ((nearest - w).flatten(1).norm(dim=1) <= (rival - w).flatten(1).norm(dim=1)).all()


@settings(deadline=None, max_examples=30)
@given(SHAPES, SEEDS, st.sampled_from([*RANDOM, "qr", "polar"]), st.floats(0.1, 10))
def test_gain_scales_and_match_keeps_each_heads_norm(shape, seed, init, gain):
    w = before(shape)
    one, scaled, matched = (
        orthogonal.init_weight(init, g, w, orthogonal.generator_for(seed, "w")) for g in (1.0, gain, "match")
    )
    assert torch.allclose(scaled, gain * one)
    assert torch.allclose(matched.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1))


@settings(deadline=None, max_examples=20)
@given(SHAPES, SEEDS, st.sampled_from(RANDOM))
def test_a_random_init_depends_on_seed_and_name_alone(shape, seed, init):
    def draw(s, name):
        return orthogonal.init_weight(init, 1.0, torch.zeros(shape), orthogonal.generator_for(s, name))

    assert torch.equal(draw(seed, "layer.0.q"), draw(seed, "layer.0.q"))
    if min(shape) > 1:
        assert not torch.equal(draw(seed, "layer.0.q"), draw(seed, "layer.0.k"))
        assert not torch.equal(draw(seed, "layer.0.q"), draw(seed + 1, "layer.0.q"))


def test_headwise_has_the_moments_of_the_haar_distribution():
    """On the Stiefel manifold E[w_ij] = 0, E[w_ij^2] = 1/d, and E[w_ij^4] = 3 / (d (d + 2))."""
    d, n = 8, 4000
    w = orthogonal.headwise(n, 3, d, orthogonal.generator_for(1, "haar"))
    assert w.mean(0).abs().max() < 5 * (1 / d / n) ** 0.5
    assert (w.square().mean(0) - 1 / d).abs().max() < 0.01
    assert (w.pow(4).mean(0) - 3 / (d * (d + 2))).abs().max() < 0.01
    # Without the fixed signs, LAPACK's QR would prefer one sign; the Haar distribution prefers none.
    assert abs((w[:, 0, 0] > 0).double().mean() - 0.5) < 0.04


def test_row_norms_are_those_of_the_original_study():
    shape, stream = (8, 64, 512), orthogonal.generator_for(0, "w")
    row = {
        init: float(orthogonal.init_weight(init, 1.0, torch.zeros(shape), stream).norm(dim=-1).mean())
        for init in RANDOM
    }
    assert row["headwise"] == pytest.approx(1)
    assert row["global"] == pytest.approx(1)
    assert row["normal-matched"] == pytest.approx(1, abs=0.01)
    assert row["normal"] == pytest.approx(0.45, abs=0.01)


def test_keep_returns_the_old_weights():
    w = before((2, 3, 5))
    assert torch.equal(orthogonal.init_weight("keep", 1.0, w, None), w)


def test_heads_without_an_orthonormal_basis_are_refused():
    with pytest.raises(OelmError, match="cannot have orthonormal rows"):
        orthogonal.headwise(1, 9, 8, orthogonal.generator_for(0, "w"))
    with pytest.raises(OelmError, match="dependent"):
        orthogonal.init_weight("qr", 1.0, torch.zeros(2, 3, 8), None)
    with pytest.raises(OelmError, match="dependent"):
        orthogonal.init_weight("polar", 1.0, torch.zeros(2, 3, 8), None)
