"""A guard that raises an error at every bf16 or fp16 matmul on the CPU, even if the CPU supports it.

On some CPUs such a matmul kills the process with SIGILL, so `oelm.low_precision` first probes it in a child
process. Code that runs such a matmul without the probe must fail its tests on every machine, not only on
these CPUs. The guard replaces torch's CPU matmul kernels by ones that check the dtypes first. It covers all
threads, backward passes and autocast, and costs about 10 us per matmul. A TorchDispatchMode would cost
several times as much and cover only one thread.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SWITCH = "FORBID_LOW_PRECISION_MATMUL"  # environment variable that makes child processes install the guard
OPERATORS = {
    *("mm", "addmm", "addmm_", "_addmm_activation", "bmm", "baddbmm", "baddbmm_", "addbmm", "addbmm_"),
    *("mv", "addmv", "addmv_", "dot", "vdot", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
    *("convolution", "convolution_backward", "mkldnn_convolution"),
    *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *("_linear_pointwise", "_convolution_pointwise", "_convolution_pointwise_", "_mkl_linear"),
}
# Operators without a kernel of their own for the CPU: they use a kernel that all devices share.
COMPOSITE = {"mv", "convolution", "convolution_backward", "mkldnn_convolution", "_grouped_mm"}

violations: list[str] = []  # names of the operators that were called with bf16 or fp16 tensors
_enabled = True
_libraries: list[Any] = []  # kept here because torch drops the replaced kernels when a library is deleted


class LowPrecisionMatmul(AssertionError):
    """A test tried to run a bf16 or fp16 matmul on the CPU."""


def install_with_torch() -> None:
    """Install the guard if torch is imported, otherwise as soon as it is.

    The guard itself does not import torch, so that tests without torch stay fast.
    """
    os.environ[SWITCH] = "1"
    if "torch" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _InstallAfterTorch())


@contextmanager
def allowed() -> Iterator[None]:
    """Disable the guard inside the `with` block and in processes started there.

    This is for the probe, and for tests that run bf16 matmuls after the probe has passed.
    """
    global _enabled
    _enabled = False
    before = os.environ.pop(SWITCH, None)
    try:
        yield
    finally:
        _enabled = True
        if before is not None:
            os.environ[SWITCH] = before


def install() -> None:
    """Replace the CPU kernels of all operators in OPERATORS by guarded ones."""
    import torch

    if _libraries:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about replaced kernels
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd")
        for space in ("aten", "mkldnn", "mkl"):
            library = torch.library.Library(space, "IMPL")
            _libraries.append(library)
            for name in {*registered, *composite}:
                base = name.partition("::")[2].partition(".")[0]
                if not name.startswith(f"{space}::") or base not in OPERATORS:
                    continue
                if name in registered or base in COMPOSITE:
                    _guard(library, name)


def _guard(library: Any, name: str) -> None:
    import torch

    kernel = torch.library.get_kernel(name, "CPU")
    low, tensor = (torch.bfloat16, torch.float16), torch.Tensor

    def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _enabled:
            for value in args:
                if isinstance(value, tensor) and value.dtype in low:
                    violations.append(name)
                    raise LowPrecisionMatmul(
                        f"{name} with {value.dtype} tensors kills the process on some CPUs. Use fp32, or "
                        f"mark the test with @pytest.mark.bf16, which first probes what this CPU supports"
                    )
        return kernel.call_boxed(keyset, *args, **kwargs)

    library.impl(name.partition("::")[2], guarded, "CPU", with_keyset=True, allow_override=True)


class _InstallAfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that imports torch as usual and then installs the guard."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        install()
