"""Choose the floating-point format of matmuls. Weights and optimizer state are always fp32."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch

from oelm.errors import UsageError
from oelm.low_precision import require_cpu_matmul

Requested = Literal["auto", "fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Precision:
    """The floating-point format chosen for a run, and the reason; both are written to manifest.json."""

    dtype: Literal["fp32", "bf16", "fp16"]
    reason: str
    device: str = "cpu"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16 if self.dtype == "bf16" else torch.float16)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler that prevents underflow in fp16; it does nothing in other formats."""
        return torch.amp.GradScaler(self.device, enabled=self.dtype == "fp16")


def choose_precision(requested: Requested, device: torch.device) -> Precision:
    """Return the precision of a run; raise UsageError if `device` does not support the requested format."""
    kind = device.type
    if kind == "cuda":
        return _on_cuda(requested)
    if requested == "fp16":
        raise UsageError(f"precision fp16 needs a CUDA device, but this run is on {kind}; use fp32 or auto")
    if requested == "bf16":
        reason = "requested"
        if kind == "cpu":
            probe = require_cpu_matmul("bf16", "precision bf16", "Use fp32 or auto")
            reason += f"; a probe of bf16 matmuls {probe.detail}"
        return Precision("bf16", reason, kind)
    return Precision("fp32", "requested" if requested == "fp32" else f"the default on {kind}", kind)


def _on_cuda(requested: Requested) -> Precision:
    name = torch.cuda.get_device_name()
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    capability = torch.cuda.get_device_capability()
    if requested == "bf16" and not native:
        raise UsageError(f"precision bf16 is not supported by the GPU {name}: use fp16, fp32 or auto")
    if requested != "auto":
        return Precision(requested, "requested", "cuda")
    if native:
        return Precision("bf16", f"{name} has bf16 matmuls", "cuda")
    if capability >= (7, 0):
        return Precision("fp16", f"{name} has fp16 tensor cores but no bf16", "cuda")
    return Precision("fp32", f"{name} has neither bf16 nor fp16 tensor cores", "cuda")
