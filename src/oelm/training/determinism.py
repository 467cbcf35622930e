"""The same numbers every time, where that is cheap.

On a CPU with the same number of threads every operation used here already is deterministic. On CUDA some
backward passes add in no fixed order unless asked to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Within it CUDA adds in a fixed order; after it, the caller's random state is what it was before."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        if not cuda:
            yield
            return
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
