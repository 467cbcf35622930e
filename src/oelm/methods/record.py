"""The record of the method on a model: which tensors it acts on, when each is frozen, and their hashes.

The record is an attribute of the model, where the schedule, the audit, saving and loading find it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.method import Method
from oelm.methods.reading.projection import Place, full_tensor
from oelm.methods.reading.select import ALL, Selection
from oelm.methods.reading.wrappers import unwrap

_ATTRIBUTE = "_oelm"


@dataclass
class TensorRecord:
    """One parameter that a method initialises or freezes."""

    name: str  # name of the parameter in the plain model
    part: str  # "q", "k" or "ffn"
    kind: str  # "weight" or "bias"
    num_heads: int
    head_dim: int
    transposed: bool
    rebuildable: bool  # whether seed, name and method determine it, so that a compact save leaves it out
    freezes_at: float | None  # fraction of the run at which it freezes; None if it always trains
    thaws_at: float | None  # fraction of the run at which it thaws; None if it never does
    sha256: str = ""  # hash of its bytes while it is frozen; "" while it trains

    def frozen_at(self, progress: float) -> bool:
        """Return whether the parameter is frozen at this fraction of the run."""
        if self.freezes_at is None or progress < self.freezes_at:
            return False
        return self.thaws_at is None or progress < self.thaws_at

    @property
    def ever_frozen(self) -> bool:
        return self.freezes_at is not None

    @property
    def ever_trained(self) -> bool:
        return self.freezes_at is None or self.freezes_at > 0 or self.thaws_at is not None

    def heads(self, tensor: Tensor) -> Tensor:
        """Return a weight as (num_heads, head_dim, d_in), detached."""
        full = full_tensor(tensor.detach())
        rows = full.flatten(1).t() if self.transposed else full
        return rows.reshape(self.num_heads, self.head_dim, -1)


@dataclass
class Record:
    """What `oelm.apply` did to a model: method, seed and tensors; and the current position in the run."""

    method: Method
    seed: int
    tensors: dict[str, TensorRecord]
    extras: list[str] = field(default_factory=list)  # names of the parameters that the method added
    frozen_before: list[str] = field(default_factory=list)  # parameters that the user froze before apply
    selection: Selection = ALL  # the modules that `where` and `exclude` chose
    replaced: list[tuple[str, nn.Module]] = field(default_factory=list)  # name and original, in order
    use_cache: dict[str, bool] = field(default_factory=dict)  # settings of the model before they were changed
    progress: float = 0.0
    verified: bool = True  # False: apply(..., verify=False) skipped the numeric check of Q and K


def attach_record(model: nn.Module, record: Record) -> None:
    setattr(unwrap(model), _ATTRIBUTE, record)


def detach_record(model: nn.Module) -> None:
    delattr(unwrap(model), _ATTRIBUTE)


def record_of(model: nn.Module) -> Record | None:
    return getattr(unwrap(model), _ATTRIBUTE, None)


def require_record(model: nn.Module, caller: str) -> Record:
    """Return the model's record. Raise OelmError, whose text starts with `caller`, if there is none."""
    record = record_of(model)
    if record is None:
        inside = modules_with_record(model)
        advice = f"pass its submodule '{inside[0]}', which has one" if inside else "call oelm.apply first"
        raise OelmError(f"{caller}: this {type(unwrap(model)).__name__} has no method; {advice}")
    return record


def modules_with_record(model: nn.Module) -> list[str]:
    """Return the names of the submodules that were passed to `oelm.apply` on their own."""
    modules = unwrap(model).named_modules()
    return [name for name, module in modules if name and _ATTRIBUTE in module.__dict__]


def find_parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter `name`, also from inside a PEFT adapter; None if the model does not have it."""
    try:
        return unwrap(model).get_parameter(name)  # an adapter layer passes on the weight of its base layer
    except AttributeError:
        return None


def require_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter `name`. Raise OelmError if another module has replaced it since `oelm.apply`."""
    parameter = find_parameter(model, name)
    if parameter is None:
        raise OelmError(
            f"{name} is not in the model any more: another module replaced it (a parametrization, or PEFT's "
            f"modules_to_save, which trains a copy). Change the model before oelm.apply. PEFT adapters such "
            f"as LoRA may be added afterwards, on layers that are not frozen"
        )
    return parameter


def freeze_and_thaw_times(method: Method, place: Place) -> tuple[float | None, float | None]:
    """Return when a layer freezes and thaws, as fractions of the run; (None, None) if it always trains."""
    frozen_layers = {
        "none": 0,
        "all": place.depth,
        "first": min(method.layers, place.depth),
        "all-but-last": max(place.depth - method.layers, 0),
    }[method.freeze]
    if place.layer >= frozen_layers:
        return None, None
    if method.schedule == "early":
        return method.freeze_at, None
    if method.schedule == "gradual":
        from_top = frozen_layers - 1 - place.layer
        span = method.thaw_to - method.thaw_from
        return 0.0, method.thaw_from + span * from_top / max(frozen_layers - 1, 1)
    return 0.0, None


def follow_schedule(model: nn.Module, record: Record, progress: float) -> list[nn.Parameter]:
    """Freeze and thaw the model's tensors as the schedule says at `progress`; return those that changed.

    The result depends on `progress` alone, so a resumed run only has to call this once.
    """
    changed: list[nn.Parameter] = []
    for tensor in record.tensors.values():
        parameter = require_parameter(model, tensor.name)
        frozen = tensor.frozen_at(progress)
        if tensor.ever_frozen and frozen != bool(tensor.sha256):
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None
            tensor.sha256 = sha256(parameter) if frozen else ""
            changed.append(parameter)
    record.progress = progress
    return changed


def sha256(tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes, shape and dtype: equal hashes mean bit-equal tensors."""
    if tensor.is_meta:
        raise OelmError("the model is on the meta device, where tensors have no values to check or save")
    data = full_tensor(tensor.detach()).cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
