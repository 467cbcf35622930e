"""Read and write oelm.json, a file next to the weights with the model class, method and frozen tensors."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_json
from oelm.files.read import read_json_object
from oelm.methods.method import Method
from oelm.methods.reading.wrappers import plain_parameters
from oelm.methods.record import TensorRecord, require_record
from oelm.methods.saving.plain import BIAS_SETTINGS

METADATA = "oelm.json"
KINDS = ("transformers", "oelm", "module")  # where the model class is defined; "module" is the user's code
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_FORMAT = 1


@dataclass(frozen=True)
class Metadata:
    """The content of oelm.json."""

    model_class: str  # "<module>:<qualified name of the class>"
    kind: str  # one of KINDS
    compact: bool  # whether the weight file leaves out frozen random tensors
    dtype: str  # the widest dtype of its tensors
    method: Method
    seed: int
    progress: float  # completed fraction of the training run, from 0 to 1
    verified: bool  # whether oelm.apply verified numerically that the projections are Q and K
    extras: list[str]  # names of the parameters that the method added
    frozen_before: list[str]  # names of the parameters that the user froze before apply
    tensors: list[TensorRecord]
    where: list[str] = field(default_factory=list)  # argument of oelm.apply; so is `exclude`
    exclude: list[str] = field(default_factory=list)
    # settings in config.json that were changed to True, so that the saved model has biases (see `plain.py`)
    settings: dict[str, bool] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # the dtype of each tensor with another dtype
    # use_cache of "config" and "generation_config" before oelm.apply turned it off, for oelm.remove
    use_cache: dict[str, bool] = field(default_factory=dict)
    torch: str = ""  # version of torch that wrote the folder
    format: int = _FORMAT

    @classmethod
    def of(cls, model: nn.Module, *, compact: bool, settings: dict[str, bool]) -> Metadata:
        record = require_record(model, "save")
        dtypes = {n: t.dtype for n, t in named_tensors(model).items() if t.dtype in DTYPES.values()}
        parameters = plain_parameters(model)
        widest = functools.reduce(torch.promote_types, dtypes.values())
        return cls(
            model_class=f"{type(model).__module__}:{type(model).__qualname__}",
            kind=kind_of(model),
            compact=compact,
            dtype=str(widest).removeprefix("torch."),
            dtypes={n: str(t).removeprefix("torch.") for n, t in dtypes.items() if t != widest},
            method=record.method,
            seed=record.seed,
            progress=record.progress,
            verified=record.verified,
            extras=record.extras,
            # without the names that a PEFT wrapper had then, which an unwrapped model does not have
            frozen_before=[name for name in record.frozen_before if name in parameters],
            tensors=list(record.tensors.values()),
            where=list(record.selection.where),
            exclude=list(record.selection.exclude),
            settings=settings,
            use_cache=record.use_cache,
            torch=torch.__version__,
        )

    def write(self, folder: Path) -> None:
        write_json(folder / METADATA, {**dataclasses.asdict(self), "method": self.method.to_dict()})

    @classmethod
    def read(cls, folder: Path | str) -> Metadata:
        """Return the content of oelm.json; check every field, because the file may be untrusted."""
        path = Path(folder) / METADATA
        if not Path(folder).is_dir():
            raise OelmError(f"{folder} is not a folder; pass a folder that oelm.save wrote")
        if not path.is_file():
            raise OelmError(
                f"{folder} contains no {METADATA}, so it was not written by oelm.save. Load it with the "
                f"library that wrote it, then call oelm.apply"
            )
        try:
            fields = read_json_object(path)
            if fields.get("format") != _FORMAT:
                raise OelmError(
                    f"{path} has format {fields.get('format')!r}, but this version of oelm reads only format "
                    f"{_FORMAT}. Use the version of oelm that wrote the folder"
                )
            return cls._from_dict(fields)
        except (ValueError, TypeError, UsageError) as error:
            raise OelmError(f"{path} is damaged: {error}. Restore it from a copy") from None

    @classmethod
    def _from_dict(cls, fields: dict[str, Any]) -> Metadata:
        method = Method.from_dict(fields.get("method", {}))
        tensors = [TensorRecord(**entry) for entry in fields.get("tensors", ())]
        metadata = cls(**{**fields, "method": method, "tensors": tensors})
        valid = {
            "model_class": isinstance(metadata.model_class, str),
            "kind": metadata.kind in KINDS,
            "compact": isinstance(metadata.compact, bool),
            "dtype": metadata.dtype in DTYPES,
            "dtypes": all(dtype in DTYPES for dtype in metadata.dtypes.values()),
            "seed": isinstance(metadata.seed, int) and metadata.seed >= 0,
            "progress": isinstance(metadata.progress, int | float) and 0 <= metadata.progress <= 1,
            "verified": isinstance(metadata.verified, bool),
            "extras": all(isinstance(name, str) for name in metadata.extras),
            "frozen_before": all(isinstance(name, str) for name in metadata.frozen_before),
            "where": all(isinstance(pattern, str) for pattern in metadata.where),
            "exclude": all(isinstance(pattern, str) for pattern in metadata.exclude),
            "use_cache": all(isinstance(value, bool | None) for value in metadata.use_cache.values()),
            "torch": isinstance(metadata.torch, str),
            "settings": all(n in BIAS_SETTINGS and v is True for n, v in metadata.settings.items()),
            "tensors": all(isinstance(t.name, str) and isinstance(t.sha256, str) for t in tensors)
            and all(isinstance(at, int | float | None) for t in tensors for at in (t.freezes_at, t.thaws_at)),
        }
        for name, is_valid in valid.items():
            if not is_valid:
                raise ValueError(f"the field {name} has an invalid value")
        return metadata


def kind_of(model: nn.Module) -> str:
    """Return where the model's class is defined, as one of KINDS."""
    if type(model).__module__.startswith("transformers."):
        return "transformers"
    ours = type(model).__module__.startswith("oelm.")
    return "oelm" if ours and hasattr(model, "save") and hasattr(type(model), "from_config") else "module"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict that maps the name of each parameter and persistent buffer to its tensor.

    Unlike in `model.state_dict()`, Q, K and V of a split fused weight are separate tensors.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors
