"""The initialisations of a query or key matrix, as pure functions that return tensors of shape (H, hs, d).

H is the number of heads, hs the head size, d the input width. Everything is computed on the CPU in float64
from an explicit generator, so the weights do not depend on the device. The caller casts them to the dtype of
the model.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor

from oelm.errors import OelmError
from oelm.methods.method import Init


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return the random generator for one tensor; its seed is made from `seed` and the tensor's name.

    So the random numbers do not depend on the order of the model's modules, and `oelm.load()` can rebuild the
    tensors that `oelm.save(..., compact=True)` left out.
    """
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def gaussian(shape: tuple[int, ...], generator: torch.Generator, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * std


def orthonormal_rows(w: Tensor) -> Tensor:
    """Return orthonormal rows that span the same space as the rows of w (..., hs, d), by QR.

    QR determines the columns of Q only up to their signs. Multiplying them by sign(diag R) makes the result
    unique, and Haar distributed if w is Gaussian (Mezzadri 2007).
    """
    q, r = torch.linalg.qr(w.mT)  # (..., d, hs), (..., hs, hs)
    diagonal = r.diagonal(dim1=-2, dim2=-1)  # (..., hs)
    _check_independent(diagonal.abs())
    signs = torch.where(diagonal < 0, -1.0, 1.0)  # (..., hs)
    return (q * signs[..., None, :]).mT  # (..., hs, d)


def nearest_orthonormal(w: Tensor) -> Tensor:
    """Return the matrix with orthonormal rows that is nearest to w (..., hs, d) in the Frobenius norm.

    It is the polar factor U V^T of the singular value decomposition w = U S V^T.
    """
    u, s, vt = torch.linalg.svd(w, full_matrices=False)  # (..., hs, hs), (..., hs), (..., hs, d)
    _check_independent(s)
    return u @ vt


def _check_independent(sizes: Tensor) -> None:
    """Raise OelmError if rows of a head are linearly dependent, so that one of its `sizes` (..., hs) is 0."""
    if not (sizes.amin(-1) > 1e-10 * sizes.amax(-1)).all():
        raise OelmError(
            "the rows of a head are linearly dependent or zero, so they cannot be orthonormalised; "
            'use a random init such as "headwise"'
        )


def headwise(H: int, hs: int, d: int, generator: torch.Generator) -> Tensor:
    """Return random weights with orthonormal rows in each head (W_h W_h^T = I); the heads are independent."""
    if hs > d:
        raise OelmError(
            f"a head of {hs} rows cannot have orthonormal rows in {d} dimensions; "
            f'use init "normal-matched", or more and smaller heads'
        )
    return orthonormal_rows(gaussian((H, hs, d), generator))


def across_heads(H: int, hs: int, d: int, generator: torch.Generator) -> Tensor:
    """Return random weights (H, hs, d) with H hs orthonormal rows, or d orthonormal columns if H hs > d."""
    if H * hs <= d:
        return orthonormal_rows(gaussian((H * hs, d), generator)).reshape(H, hs, d)
    return orthonormal_rows(gaussian((d, H * hs), generator)).mT.reshape(H, hs, d)


def init_weight(
    init: Init, gain: float | Literal["match"], old: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Return the initial weights (H, hs, d), in float64, of a projection whose present weights are `old`."""
    old = old.detach().to("cpu", torch.float64)
    if init == "keep":
        return old
    new = _init_with_unit_gain(init, old, generator)
    if gain == "match":  # keep each head's Frobenius norm, which sets the scale of the logits
        return new * (_head_norms(old) / _head_norms(new))
    return new * gain


def _init_with_unit_gain(init: Init, old: Tensor, generator: torch.Generator | None) -> Tensor:
    H, hs, d = old.shape
    if init == "qr":
        return orthonormal_rows(old)
    if init == "polar":
        return nearest_orthonormal(old)
    assert generator is not None, f'init "{init}" is random, so it needs a generator'
    if init == "headwise":
        return headwise(H, hs, d, generator)
    if init == "global":
        return across_heads(H, hs, d, generator)
    std = {"normal": 0.02, "normal-matched": d**-0.5}[init]
    return gaussian((H, hs, d), generator, std)


def _head_norms(w: Tensor) -> Tensor:
    return w.flatten(1).norm(dim=1)[:, None, None]  # (H, 1, 1)


def orthonormality_error(w: Tensor) -> float:
    """Return how far the rows of the heads W_h in `w` are from orthonormal: max |W_h W_h^T / s - I|.

    s is the mean squared row norm; dividing by s makes the error independent of the gain. For heads with more
    rows than columns, the columns are used instead of the rows.
    """
    w = w.detach().to("cpu", torch.float64)
    w = w.mT if w.shape[-2] > w.shape[-1] else w  # (H, n, m) with n <= m
    gram = w @ w.mT  # (H, n, n)
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]  # (H, 1, 1)
    return float((gram / scale - torch.eye(w.shape[-2], dtype=w.dtype, device="cpu")).abs().max())
