"""Make compact saves portable: store the entries that another machine could round to a different value.

A frozen random tensor depends only on seed, name and method (see `orthogonal.py`): it is made from random
numbers of torch's CPU generator (Mersenne Twister, float64) by a QR decomposition in float64, and then
rounded to the model's dtype. It does not depend on the device. But linear algebra libraries differ in the
last bits of float64, so an entry that is almost exactly between two values of the model's dtype (a rounding
tie) can be rounded to either. There are few such entries, so a compact save contains them, and `oelm.load()`
writes them over the rebuilt ones before it checks the hash.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oelm.methods.install import initial_weight, targets_of
from oelm.methods.reading.feed_forward import ffn_matrices
from oelm.methods.reading.find import find_projections
from oelm.methods.reading.projection import FeedForward, Projection
from oelm.methods.reading.wrappers import plain_parameters
from oelm.methods.record import Record

#: Entries closer than this to a rounding boundary are stored. Results of QR in float64 differ by about 1e-15
#: between machines.
MARGIN = 1e-13
_AT, _VALUES = ".rounding_ties_at", ".rounding_ties"  # endings of keys in a compact weight file


@torch.no_grad()
def rounding_ties(model: nn.Module, record: Record) -> dict[str, Tensor]:
    """Return the positions and values of all rounding ties in the tensors that a compact save leaves out."""
    ties = {}
    for target in _rebuildable(model, record):
        exact = initial_weight(record.method, record.seed, target)
        values = target.weight.values().flatten()
        low, high = (exact - MARGIN).to(values.dtype), (exact + MARGIN).to(values.dtype)
        at = (low != high).flatten().nonzero()[:, 0]
        if len(at) and values.dtype != torch.float64:
            ties[target.name + _AT] = at.to(torch.int32)
            ties[target.name + _VALUES] = values[at.to(values.device)]
    return ties


@torch.no_grad()
def take_ties(model: nn.Module, record: Record, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the rounding ties among `tensors` (from a compact save) into the model; return the others."""
    for target in _rebuildable(model, record):
        at, kept = tensors.get(target.name + _AT), tensors.get(target.name + _VALUES)
        if at is not None and kept is not None and at.shape == kept.shape:
            values = target.weight.values().flatten().clone()
            # Clamp, because the positions in a damaged file can be out of range.
            values[at.long().clamp(0, len(values) - 1)] = kept.to(values.dtype)
            target.weight.write(values)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith((_AT, _VALUES))}


def _rebuildable(model: nn.Module, record: Record) -> Iterator[Projection | FeedForward]:
    """Yield the projections and FFN matrices whose weight a compact save leaves out."""
    names = {id(parameter): name for name, parameter in plain_parameters(model).items()}
    matrices = ffn_matrices(model, record.selection) if "ffn" in record.method.parts else []
    for target in targets_of(record.method, find_projections(model, record.selection), matrices):
        tensor = record.tensors.get(names[id(target.weight.parameter)])
        if tensor is not None and tensor.rebuildable:
            yield target
