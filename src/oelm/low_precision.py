"""Test in a separate process whether this CPU can multiply bf16 and fp16 matrices.

Some CPUs and virtual machines report that they support instructions such as amx_bf16, but a process that
executes one is killed by SIGILL. Therefore no bf16 or fp16 matmul runs on a CPU before this test (the
"probe") has passed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from typing import Literal, NamedTuple

from oelm.errors import UsageError

LowPrecision = Literal["bf16", "fp16"]

# The matrices are as large as in a training step, because small matmuls use other CPU instructions.
# The probe prints the speed relative to fp32, because a CPU that emulates bf16 may be ten times slower.
_PROBE = """
import sys, time, torch
seconds = []
for dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1]]):
    x = torch.randn(2048, 512).to(dtype)
    w = torch.randn(2048, 512).to(dtype).requires_grad_()
    start = time.perf_counter()
    torch.nn.functional.linear(x, w).float().square().mean().backward()
    q = x.view(4, 512, 8, 64).transpose(1, 2)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    seconds.append(time.perf_counter() - start)
    assert torch.isfinite(w.grad.float()).all()
print(seconds[0] / seconds[1])
"""
_TIMEOUT = 120.0


class Probe(NamedTuple):
    """The result of a probe; `detail` completes the sentence "the probe ...", e.g. "was killed by SIGILL"."""

    passed: bool
    detail: str


@cache
def probe_cpu_matmul(dtype: LowPrecision) -> Probe:
    """Test in a separate process whether forward and backward matmuls in `dtype` work; cache the result."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, dtype],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(False, f"did not finish in {_TIMEOUT:.0f} s")
    if done.returncode < 0:
        return Probe(False, f"was killed by {_signal_name(-done.returncode)}")
    if done.returncode > 0:
        return Probe(False, f"failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return Probe(True, f"passed at {float(done.stdout.split()[-1]):.2g} times the speed of fp32")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def require_cpu_matmul(dtype: LowPrecision, what: str, instead: str) -> Probe:
    """Return the result of `probe_cpu_matmul(dtype)`; raise UsageError if the probe failed.

    The message says that `what` (a feature that needs matmuls in `dtype`) does not work on this CPU. It ends
    with `instead`, a sentence that says what to do instead.
    """
    probe = probe_cpu_matmul(dtype)
    if not probe.passed:
        raise UsageError(
            f"{what} does not work on this CPU: a probe of {dtype} matmuls, run in a separate process, "
            f"{probe.detail}. {instead}"
        )
    return probe
