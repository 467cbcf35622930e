"""Make a run reproducible: deterministic CUDA kernels, and a random state that is private to the run.

On the CPU, every operation of a run is deterministic without this for a fixed number of threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

RandomState = dict[str, torch.Tensor]


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic CUDA kernels in the `with` block; restore the caller's random state at its end.

    On CUDA, an operation without a deterministic kernel causes a warning, no error, and the environment
    variable CUBLAS_WORKSPACE_CONFIG stays set after the block.
    """
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


def random_state(device: torch.device) -> RandomState:
    """Return the state of torch's global random generators, which dropout uses."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Set torch's global random generators to a `state` that `random_state()` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
