"""The probe for bf16 and fp16 matmuls on CPUs, and the guard that stops them in other tests."""

import contextlib
import subprocess
import sys
import threading

import low_precision_guard
import pytest
import torch
import torch.nn.functional as F
from low_precision_guard import LowPrecisionMatmul

from oelm import low_precision
from oelm.errors import UsageError
from oelm.low_precision import probe_cpu_matmul, require_cpu_matmul

BF16, FP16 = torch.bfloat16, torch.float16


def caught(run, *args):
    """Return whether the guard stops this call."""
    try:
        run(*args)
    except LowPrecisionMatmul:
        low_precision_guard.violations.clear()
        return True
    return False


def square(dtype):
    return torch.ones(8, 8, dtype=dtype)


def cube(dtype):
    return torch.ones(2, 8, 8, dtype=dtype)


MATMULS = {
    "@": lambda d: square(d) @ square(d),
    "matmul of a batch": lambda d: cube(d) @ cube(d),
    "matrix @ vector": lambda d: square(d) @ square(d)[0],
    "vector @ vector": lambda d: square(d)[0] @ square(d)[0],
    "addmm": lambda d: torch.addmm(square(d), square(d), square(d)),
    "addmm_": lambda d: square(d).addmm_(square(d), square(d)),
    "mm out": lambda d: torch.mm(square(d), square(d), out=square(d)),
    "baddbmm": lambda d: torch.baddbmm(cube(d), cube(d), cube(d)),
    "einsum": lambda d: torch.einsum("ij,bjk->bik", square(d), cube(d)),
    "tensordot": lambda d: torch.tensordot(square(d), cube(d), dims=([1], [1])),
    "linear": lambda d: F.linear(cube(d), square(d), square(d)[0]),
    "inference": lambda d: torch.inference_mode()(F.linear)(cube(d), square(d)),
    "conv1d": lambda d: F.conv1d(cube(d), torch.ones(8, 8, 3, dtype=d)),
    "attention": lambda d: F.scaled_dot_product_attention(cube(d)[None], cube(d)[None], cube(d)[None]),
    "causal attention": lambda d: F.scaled_dot_product_attention(*[cube(d)[None]] * 3, is_causal=True),
    "lstm": lambda d: torch.nn.LSTM(8, 8).to(d)(cube(d)),
    "encoder layer": lambda d: torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).to(d).eval()(cube(d)),
    "autocast": lambda d: torch.autocast("cpu", dtype=d)(F.linear)(torch.ones(8, 8), torch.ones(8, 8)),
}


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MATMULS)
def test_the_guard_stops_low_precision(name, dtype):
    assert caught(MATMULS[name], dtype)


@pytest.mark.parametrize("name", [name for name in MATMULS if name != "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_guard_allows_fp32_and_fp64(name, dtype):
    assert MATMULS[name](dtype) is not None


def test_the_guard_works_in_backward_passes_and_other_threads():
    class LowPrecisionBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return (grad.to(BF16) @ square(BF16)).float()

    y = LowPrecisionBackward.apply(torch.ones(8, 8, requires_grad=True)).sum()
    assert caught(y.backward)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(caught(MATMULS["@"], BF16)))
    thread.start()
    thread.join()
    assert answers == [True]


PROGRAM = "import torch; x = torch.ones(8, 8); print((x @ x).sum().item()); x.bfloat16() @ x.bfloat16()"


def test_the_guard_works_in_subprocesses():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "512.0\n"
    assert (
        "LowPrecisionMatmul: aten::mm with torch.bfloat16 tensors kills the process on some CPUs"
        in done.stderr
    )


def test_a_violation_is_recorded_when_the_code_catches_the_exception():
    with contextlib.suppress(Exception):
        MATMULS["@"](BF16)
    assert low_precision_guard.violations == ["aten::mm"]  # which fails the test at its end, see conftest.py
    low_precision_guard.violations.clear()


@pytest.fixture
def fresh_probe():
    probe_cpu_matmul.cache_clear()
    yield
    probe_cpu_matmul.cache_clear()


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was killed by SIGILL"),
        ("raise RuntimeError('no kernel')", "failed: RuntimeError: no kernel"),
        ("import time; time.sleep(600)", "did not finish in 1 s"),
    ],
)
def test_a_failed_probe_is_an_error_with_the_cause(monkeypatch, fresh_probe, program, detail):
    monkeypatch.setattr(low_precision, "_PROBE", program)
    monkeypatch.setattr(low_precision, "_TIMEOUT", 1.0 if "sleep" in program else 300.0)
    with pytest.raises(UsageError) as error:
        require_cpu_matmul("bf16", "precision bf16", "Use fp32")
    assert str(error.value) == (
        "precision bf16 does not work on this CPU: a probe of bf16 matmuls, run in a separate process, "
        f"{detail}. Use fp32"
    )


def test_the_result_of_a_probe_is_cached(monkeypatch, fresh_probe):
    monkeypatch.setattr(low_precision, "_PROBE", "print('a greeting of the site'); print(0.5)")
    assert require_cpu_matmul("bf16", "", "") == (True, "passed at 0.5 times the speed of fp32")
    monkeypatch.setattr(low_precision, "_PROBE", "raise RuntimeError")
    assert require_cpu_matmul("bf16", "", "").passed


@pytest.mark.bf16
def test_a_test_marked_bf16_may_use_bf16_if_the_probe_passed():
    assert torch.equal(MATMULS["@"](BF16), torch.full((8, 8), 8.0, dtype=BF16))
