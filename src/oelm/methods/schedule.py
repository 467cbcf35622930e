"""When a tensor is frozen: a pure function of the method, its layer and the position in the run."""

from __future__ import annotations

from torch import Tensor, nn

from oelm.methods.method import Method
from oelm.methods.reading.layers import Place
from oelm.methods.record import Record, recorded, sha256


def freezing_times(chosen: Method, place: Place) -> tuple[float | None, float | None]:
    """(freezes at, thaws at) of a layer, as shares of the run; (None, None) = trains throughout."""
    count = {
        "none": 0,
        "all": place.depth,
        "first": min(chosen.layers, place.depth),
        "all-but-last": max(place.depth - chosen.layers, 0),
    }[chosen.freeze]
    if place.layer >= count:
        return None, None
    if chosen.schedule == "early":
        return chosen.freeze_at, None
    if chosen.schedule == "gradual":
        from_top = count - 1 - place.layer
        span = chosen.thaw_to - chosen.thaw_from
        return 0.0, chosen.thaw_from + span * from_top / max(count - 1, 1)
    return 0.0, None


def settle(model: nn.Module, record: Record, progress: float) -> list[Tensor]:
    """Freeze and thaw as of `progress`; the parameters whose state changed."""
    changed: list[Tensor] = []
    for tensor in record.tensors.values():
        parameter = recorded(model, tensor.name)
        frozen = tensor.frozen_at(progress)
        if tensor.ever_frozen and frozen != bool(tensor.sha256):
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None
            tensor.sha256 = sha256(parameter) if frozen else ""
            changed.append(parameter)
    record.progress = progress
    return changed
