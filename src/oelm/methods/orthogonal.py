"""The mathematics: how a query or key matrix starts, as pure functions on (heads, head_dim, d_in).

Everything is computed on the CPU in float64 from an explicit generator and cast by the caller, so that
neither the device nor the model's dtype decides what is drawn. Shapes in the comments: H heads, hs head
size, d the width that the head reads.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor

from oelm.errors import OelmError
from oelm.methods.method import Init

Shape = tuple[int, int, int]  # (H, hs, d)


def stream(seed: int, name: str) -> torch.Generator:
    """The random stream of one tensor, a function of the run's seed and the tensor's name alone.

    Any tensor can be drawn again without drawing those before it: the order in which a model lists its
    modules does not matter, and a compact save can rebuild what it left out.
    """
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def orthonormal_rows(w: Tensor) -> Tensor:
    """(..., hs, d) -> the same shape with orthonormal rows spanning the same space, by a sign-fixed QR.

    LAPACK leaves the signs of Q's columns open; multiplying by sign(diag R) makes the factorisation
    unique, so the result is deterministic, and Haar distributed when w is Gaussian (Mezzadri 2007).
    """
    q, r = torch.linalg.qr(w.mT)  # (..., d, hs), (..., hs, hs)
    diagonal = r.diagonal(dim1=-2, dim2=-1)  # (..., hs)
    if not (diagonal.abs().amin(-1) > 1e-10 * diagonal.abs().amax(-1)).all():
        raise OelmError(
            "the weights of a head have dependent (or zero) rows: no orthonormal rows follow from them"
        )
    return (q * torch.where(diagonal < 0, -1.0, 1.0)[..., None, :]).mT


def headwise(shape: Shape, generator: torch.Generator) -> Tensor:
    """Orthonormal rows within each head, heads independent: W_h W_h^T = 1."""
    H, hs, d = shape
    if hs > d:
        raise OelmError(
            f"a head of {hs} rows cannot have orthonormal rows in {d} dimensions; "
            f'use init "normal-matched", or more and smaller heads'
        )
    return orthonormal_rows(gaussian((H, hs, d), generator))


def whole(shape: Shape, generator: torch.Generator) -> Tensor:
    """One QR over the whole (H hs, d) matrix: orthonormal rows across heads, or columns if it is tall."""
    H, hs, d = shape
    if H * hs <= d:
        return orthonormal_rows(gaussian((H * hs, d), generator)).reshape(shape)
    return orthonormal_rows(gaussian((d, H * hs), generator)).mT.reshape(shape)


def gaussian(shape: tuple[int, ...], generator: torch.Generator, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * std


def nearest_orthonormal(w: Tensor) -> Tensor:
    """The orthonormal rows nearest to w (..., hs, d) in the Frobenius norm: its polar factor U V^T."""
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    if not (s.amin(-1) > 1e-10 * s.amax(-1)).all():
        raise OelmError(
            "the weights of a head have dependent (or zero) rows: no nearest orthonormal rows exist"
        )
    return u @ vt


def start(
    init: Init, gain: float | Literal["match"], before: Tensor, generator: torch.Generator | None
) -> Tensor:
    """The start of one projection whose weights are `before` (H, hs, d), as float64 on the CPU."""
    old = before.detach().to("cpu", torch.float64)
    if init == "keep":
        return old
    new = _unscaled(init, old, generator)
    if gain == "match":  # the Frobenius norm of each head, which is what its logits scale with
        return new * (_norms(old) / _norms(new))
    return new * gain


def _unscaled(init: Init, old: Tensor, generator: torch.Generator | None) -> Tensor:
    H, hs, d = old.shape
    if init == "qr":
        return orthonormal_rows(old)
    if init == "polar":
        return nearest_orthonormal(old)
    assert generator is not None, f'init "{init}" draws, so it needs a generator'
    if init == "headwise":
        return headwise((H, hs, d), generator)
    if init == "global":
        return whole((H, hs, d), generator)
    return gaussian((H, hs, d), generator, 0.02 if init == "normal" else d**-0.5)


def _norms(w: Tensor) -> Tensor:
    return w.flatten(1).norm(dim=1)[:, None, None]  # (H, 1, 1)


def orthonormality_error(w: Tensor) -> float:
    """The largest entry of |W_h W_h^T / s - 1| over heads, s the mean squared row norm: 0 up to any gain.

    For heads with more rows than columns the columns are meant.
    """
    w = w.detach().to("cpu", torch.float64)
    w = w.mT if w.shape[-2] > w.shape[-1] else w
    gram = w @ w.mT  # (H, hs, hs)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return float((gram / scale - torch.eye(w.shape[-2], dtype=w.dtype)).abs().max())
