"""Compact saves load where linear algebra rounds differently; the generation is pinned by hash."""

import pytest
import torch
from tiny_models import applied_model, equal_parameters, outputs, trained_model

import oelm
from oelm.methods.orthogonal import gaussian, generator_for, headwise
from oelm.methods.record import sha256

FFN = oelm.Method("frozen-ffn", init="headwise", parts=("q", "k", "ffn"), freeze="all")


@pytest.fixture
def another_machine(monkeypatch):
    """Return a function that makes QR differ by `noise`, as that of another library does."""

    def rounds_by(noise):
        exact = torch.linalg.qr

        def qr(matrix):
            q, r = exact(matrix)
            generator = torch.Generator().manual_seed(5)
            return q + noise * torch.randn(q.shape, generator=generator, dtype=q.dtype), r

        monkeypatch.setattr(torch.linalg, "qr", qr)

    return rounds_by


@pytest.mark.parametrize("method", ["oelm-freeze", "oelm-plus", FFN], ids=lambda m: getattr(m, "name", m))
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_compact_save_loads_where_the_last_bits_differ(family, method, tmp_path, another_machine):
    model = trained_model(family, method)
    oelm.save(model, tmp_path, compact=True)
    another_machine(1e-14)
    other = oelm.load(tmp_path)
    assert equal_parameters(model, other)
    assert torch.equal(outputs(model.eval()), outputs(other))
    assert oelm.audit(other).ok


def test_without_the_kept_entries_the_last_bits_matter(tmp_path, another_machine, monkeypatch):
    """The noise of the test above is large enough to change a rounding somewhere."""
    monkeypatch.setattr("oelm.methods.saving.ties.MARGIN", 0.0)
    model = applied_model("llama", seed=3)
    oelm.save(model, tmp_path, compact=True)
    another_machine(1e-10)
    with pytest.raises(oelm.OelmError, match=r"rebuilt from the seed, differs .* saved with torch 2\."):
        oelm.load(tmp_path)


def test_the_generation_is_pinned_by_hash():
    """Frozen tensors are the same with every version of torch; if this fails, compact saves are lost."""
    draws = gaussian((4, 8), generator_for(42, "layer.q"))
    assert sha256(draws.float()) == "e399b2c475889911788638b2c85c3d73d7c45fe9a0b75a1f9fb0b6e5c11416ac"
    assert (
        sha256(headwise(2, 8, 32, generator_for(42, "layer.q")).float())
        == "c9afd72833e2ac586c8c8ebd4f389dd6bb6b458d3921cdb35f84693bcaf1128b"
    )


def test_the_number_of_threads_does_not_change_a_compact_save(tmp_path):
    model = applied_model("gpt2")
    oelm.save(model, tmp_path, compact=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 if before == 1 else 1)
        assert equal_parameters(model, oelm.load(tmp_path))
    finally:
        torch.set_num_threads(before)
