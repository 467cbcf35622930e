"""Which number format the matmuls use, and why. Weights and optimizer state are fp32 in every case."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from oelm.errors import UsageError

Wish = Literal["auto", "fp32", "bf16", "fp16"]

# Matmuls of the size a training step really does: small ones take another code path and prove nothing.
# Prints how much of fp32's speed bf16 reaches: a CPU that only emulates it survives, ten times slower.
_PROBE = """
import time, torch
seconds = {}
for dtype in (torch.float32, torch.bfloat16):
    x = torch.randn(2048, 512).to(dtype)
    w = torch.randn(2048, 512).to(dtype).requires_grad_()
    start = time.perf_counter()
    torch.nn.functional.linear(x, w).float().square().mean().backward()
    q = x.view(4, 512, 8, 64).transpose(1, 2)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    seconds[dtype] = time.perf_counter() - start
    assert torch.isfinite(w.grad.float()).all()
print(seconds[torch.float32] / seconds[torch.bfloat16])
"""


@dataclass(frozen=True)
class Precision:
    """The chosen format and the reason, as logged and kept in the manifest."""

    dtype: Literal["fp32", "bf16", "fp16"]
    reason: str
    device: str = "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        """What the matrix products compute in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.torch_dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss under fp16, whose small gradients would vanish; does nothing otherwise."""
        return torch.amp.GradScaler(self.device, enabled=self.dtype == "fp16")

    def to_dict(self) -> dict[str, str]:
        return {"dtype": self.dtype, "reason": self.reason}


def choose_precision(wish: Wish, device: torch.device) -> Precision:
    """The format for `wish` on `device`; a wish it cannot fulfil is an error, never a silent change."""
    kind = device.type
    if kind == "cuda":
        return _on_cuda(wish)
    if wish == "fp16":
        raise UsageError(f"precision fp16 needs a CUDA device, this run is on {kind}; use fp32 or auto")
    if wish == "bf16":
        survived, words = probe_cpu_bf16() if kind == "cpu" else (True, "not probed")
        if not survived:
            raise UsageError(
                f"precision bf16 does not work on this CPU (a probe in its own process {words}); "
                "use fp32 or auto"
            )
        return Precision("bf16", f"asked for; a probe of real-size bf16 matmuls: {words}", kind)
    return Precision("fp32", "asked for" if wish == "fp32" else f"the default on {kind}", kind)


def _on_cuda(wish: Wish) -> Precision:
    name = torch.cuda.get_device_name()
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    capability = torch.cuda.get_device_capability()
    if wish == "bf16" and not native:
        raise UsageError(f"precision bf16: {name} has no bf16 matmuls; use fp16, fp32 or auto")
    if wish != "auto":
        return Precision(wish, "asked for", "cuda")
    if native:
        return Precision("bf16", f"{name} has bf16 matmuls", "cuda")
    if capability >= (7, 0):
        return Precision("fp16", f"{name} has fp16 tensor cores but no bf16", "cuda")
    return Precision("fp32", f"{name} has neither bf16 nor fp16 tensor cores", "cuda")


@cache
def probe_cpu_bf16() -> tuple[bool, str]:
    """Whether bf16 training survives on this CPU, and a word on how.

    In a process of its own, because on some machines the failure is an illegal instruction.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return False, "did not finish in 120 s"
    if done.returncode < 0:
        return False, f"was killed by signal {-done.returncode}"
    if done.returncode > 0:
        return False, f"failed with code {done.returncode}"
    return True, f"survived at {float(done.stdout):.2g} of fp32's speed"
