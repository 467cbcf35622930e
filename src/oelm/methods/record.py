"""The record of what `oelm.apply` did to a model: which tensors are frozen when, and their hashes.

The record is an attribute of the model. `Applied.step()`, the audit, saving and loading read it.
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

    name: str  # name of the parameter, without the parts that wrappers such as DDP add
    part: str  # "q", "k" or "ffn"
    kind: str  # "weight" or "bias"
    num_heads: int
    head_dim: int
    transposed: bool
    rebuildable: bool  # whether a compact save leaves it out: seed, name and method determine its values
    freezes_at: float | None  # fraction of the run at which it is frozen; None if it always trains
    thaws_at: float | None  # fraction of the run at which it is unfrozen; None if never
    sha256: str = ""  # hash of its values while it is frozen; "" while it trains

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
        """Return a weight, detached and reshaped to (num_heads, head_dim, d_in)."""
        full = full_tensor(tensor.detach())
        rows = full.flatten(1).t() if self.transposed else full
        return rows.reshape(self.num_heads, self.head_dim, -1)


@dataclass
class Record:
    """What `oelm.apply()` did to a model (method, seed, tensors), and the completed fraction of the run."""

    method: Method
    seed: int
    tensors: dict[str, TensorRecord]
    extras: list[str] = field(default_factory=list)  # names of the parameters that the method added
    frozen_before: list[str] = field(default_factory=list)  # parameters that the user froze before apply
    selection: Selection = ALL  # the modules that `where` and `exclude` selected
    replaced: list[tuple[str, nn.Module]] = field(default_factory=list)  # (name, module before oelm.apply)
    # use_cache of model.config and model.generation_config before oelm.apply turned it off
    use_cache: dict[str, bool] = field(default_factory=dict)
    progress: float = 0.0
    disabled: bool = False  # True inside a block of oelm.disabled, which takes the extras out of the model
    # Whether the tensors that are unfrozen later were trainable when DDP wrapped the model.
    known_to_ddp: bool = False
    trainable_until_step: bool = False  # True from `Applied.unfreeze_until_step()` to the next `step()`
    verified: bool = True  # False: apply(..., verify=False) skipped the numeric check of Q and K


def attach_record(model: nn.Module, record: Record) -> None:
    setattr(unwrap(model), _ATTRIBUTE, record)


def detach_record(model: nn.Module) -> None:
    delattr(unwrap(model), _ATTRIBUTE)


def record_of(model: nn.Module) -> Record | None:
    return getattr(unwrap(model), _ATTRIBUTE, None)


def require_record(model: nn.Module, caller: str) -> Record:
    """Return the model's record, or raise OelmError, whose text starts with `caller`.

    It is raised if no method was applied to the model, and inside a block of `oelm.disabled()`.
    """
    record = record_of(model)
    if record is None:
        inside = modules_with_record(model)
        advice = f"pass its submodule '{inside[0]}' instead" if inside else "call oelm.apply first"
        raise OelmError(f"{caller}: no method was applied to this {type(unwrap(model)).__name__}; {advice}")
    if record.disabled:
        raise OelmError(
            f"{caller}: oelm.disabled has switched off the extras of '{record.method.name}', so the model is "
            f"not complete; call this outside the `with oelm.disabled(model)` block"
        )
    return record


def modules_with_record(model: nn.Module) -> list[str]:
    """Return the names of the submodules that `oelm.apply()` was called with separately."""
    modules = unwrap(model).named_modules()
    return [name for name, module in modules if name and _ATTRIBUTE in module.__dict__]


def find_parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter `name`, also if a PEFT adapter wraps its layer; None if not found."""
    try:
        # Works with PEFT, too: the attribute `weight` of an adapter layer is the weight of its base layer.
        return unwrap(model).get_parameter(name)
    except AttributeError:
        return None


def require_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter `name`. Raise OelmError if it was replaced after `oelm.apply()`."""
    parameter = find_parameter(model, name)
    if parameter is None:
        raise OelmError(
            f"{name} is not in the model any more: something replaced it after oelm.apply (such as a "
            f"parametrization, or PEFT's modules_to_save, which trains a copy). Make such changes before "
            f"oelm.apply. Only PEFT adapters such as LoRA may be added afterwards, to layers that are not "
            f"frozen"
        )
    return parameter


def freeze_and_thaw_times(method: Method, place: Place) -> tuple[float | None, float | None]:
    """Return the fractions of the run at which a layer is frozen and unfrozen; None means never."""
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
    """Freeze and unfreeze tensors as the schedule says; return the parameters for which this changed.

    What is frozen depends only on `progress`, the completed fraction of the run. So one call is enough after
    a resume.
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
        elif frozen and record.trainable_until_step:
            parameter.requires_grad_(False)
    record.progress, record.trainable_until_step = progress, False
    return changed


def thawing(model: nn.Module, record: Record) -> list[nn.Parameter]:
    """Return the parameters that are frozen at step 0 and trained later."""
    return [
        require_parameter(model, name)
        for name, tensor in record.tensors.items()
        if tensor.frozen_at(0.0) and tensor.ever_trained
    ]


def sha256(tensor: Tensor) -> str:
    """Return the hash of a tensor's bytes, shape and dtype: equal hashes mean bit-equal tensors."""
    if tensor.is_meta:
        raise OelmError(
            "the model is on the meta device, so its tensors have no values to hash; load its weights first"
        )
    data = full_tensor(tensor.detach()).cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
