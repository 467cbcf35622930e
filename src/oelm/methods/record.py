"""What a method promised about each tensor, kept on the model so that audit, save and load find it."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.method import Method
from oelm.methods.reading.layout import whole
from oelm.methods.reading.wrappers import unwrap

_ATTRIBUTE = "_oelm"


@dataclass
class TensorRecord:
    """One parameter that a method set or freezes at some time of the run."""

    name: str  # of the parameter
    part: str  # "q", "k" or "ffn"
    kind: str  # "weight" or "bias"
    stack: str
    layer: int
    num_heads: int
    head_dim: int
    transposed: bool
    rebuildable: bool  # a pure function of seed, name and method: a compact save may leave it out
    freezes_at: float | None  # share of the run; None = trains throughout
    thaws_at: float | None  # share of the run; None = never
    sha256: str = ""  # of its bytes since it froze; "" while it trains

    def frozen_at(self, progress: float) -> bool:
        """Whether it is frozen at this share of the run: a pure function, so a resume simply asks again."""
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
        """A weight as (num_heads, head_dim, d_in), detached."""
        full = whole(tensor.detach())
        rows = full.flatten(1).t() if self.transposed else full
        return rows.reshape(self.num_heads, self.head_dim, -1)


@dataclass
class Record:
    """The method of a model, its seed, its tensors, and where in the run it stands."""

    method: Method
    seed: int
    tensors: dict[str, TensorRecord]
    extras: list[str] = field(default_factory=list)  # names of the parameters that the method added
    frozen_before: list[str] = field(default_factory=list)  # parameters that were frozen already: no promise
    progress: float = 0.0
    verified: bool = True  # False: apply(..., verify=False) skipped the numeric check of what is Q and K

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method.to_dict(),
            "seed": self.seed,
            "progress": self.progress,
            "extras": list(self.extras),
            "frozen_before": list(self.frozen_before),
            "tensors": [dataclasses.asdict(t) for t in self.tensors.values()],
        }


def attach(model: nn.Module, record: Record) -> None:
    setattr(unwrap(model), _ATTRIBUTE, record)


def record_of(model: nn.Module) -> Record | None:
    return getattr(unwrap(model), _ATTRIBUTE, None)


def required_record(model: nn.Module, wish: str) -> Record:
    record = record_of(model)
    if record is None:
        where = applied_parts(model)
        advice = f"pass its part '{where[0]}', which has one" if where else "call oelm.apply first"
        raise OelmError(f"{wish}: no method was applied to this {type(unwrap(model)).__name__}; {advice}")
    return record


def applied_parts(model: nn.Module) -> list[str]:
    """The names of the modules inside a model to which a method was applied."""
    modules = unwrap(model).named_modules()
    return [name for name, module in modules if name and _ATTRIBUTE in module.__dict__]


def find_recorded(model: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter that the record names, also under a PEFT adapter; None if it is gone."""
    try:
        return unwrap(model).get_parameter(name)  # an adapter layer shows the weight of the layer inside it
    except AttributeError:
        return None


def recorded(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter that the record names."""
    parameter = find_recorded(model, name)
    if parameter is None:
        raise OelmError(
            f"{name} is gone since oelm.apply: another module took its place (a parametrization, or PEFT's "
            f"modules_to_save, which trains a copy). Change the model first, then apply; PEFT adapters such "
            f"as LoRA may come after, on other layers than the frozen ones"
        )
    return parameter


def sha256(tensor: Tensor) -> str:
    """Of the bytes, shape and dtype: what "bit-equal" means here."""
    if tensor.is_meta:
        raise OelmError("the model is on the meta device, where tensors have no values to check or save")
    data = whole(tensor.detach()).cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
