"""The processes (ranks) of one run and their communication. Rank 0 writes all files.

Every rank builds the same global batch and takes its own rows of the batch, so no data is sent. With `World`
every rank has the full model (DistributedDataParallel), with `ShardedWorld` only a part. Frozen parameters
have no gradients, so nothing is sent for them. Ranks are started by `oelm.experiments.launch.ranks` or by
torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import socket
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oelm.config.run_config import Machine
from oelm.errors import UsageError
from oelm.files.atomic import write_json
from oelm.training.optimizer import OptimizerState
from oelm.training.signals import RANK_DIR

T = TypeVar("T")
MEETING_TIMEOUT = datetime.timedelta(minutes=10)  # how long ranks wait for the ranks of other nodes to start
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=12)  # long, because ranks wait while rank 0 tokenizes a corpus

# DDP need not copy buffers before each forward pass, because the models of a run never change their buffers.
# The DDP option for this was renamed in torch 2.13.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers": False
}


class World:
    """The ranks of a run and their communication; with a single process, nothing is communicated."""

    def __init__(self, device: str = "auto") -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.device = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0)
        self._joined = False
        self._wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only rank that writes to the run folder."""
        return self.rank == 0

    def __enter__(self) -> World:
        if self.size > 1 and not dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == self.size:
                _bind_to_loopback()
            self._init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._joined = True
        return self

    def _init_process_group(self, backend: str) -> None:
        if RANK_DIR not in os.environ:  # started by torchrun, which has set MASTER_ADDR and MASTER_PORT
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
            return
        store: dist.Store
        if "MASTER_ADDR" in os.environ:  # set by oelm's launcher if the ranks are on several nodes
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, self.size, self.is_main, timeout=MEETING_TIMEOUT)
        else:  # a private file connects the ranks of one node, because a TCPStore listens on all interfaces
            store = dist.FileStore(str(Path(os.environ[RANK_DIR]) / "store"), self.size)
        store.set_timeout(COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT
        )

    def __exit__(self, *error: object) -> None:
        self._release_reducers()
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

    def _release_reducers(self) -> None:
        """Drop DDP's references to the process group before the group is destroyed, to avoid a deadlock.

        DDP's C++ Reducer is freed with the GIL held. If it has the last reference to the process group, it
        joins gloo's thread, which may be waiting for the GIL. A traceback can keep the DDP module alive, so
        the references are dropped here instead of by the garbage collector.
        """
        for module in self._wrapped:
            module.reducer = module.logger = module.process_group = None  # type: ignore[assignment]
        self._wrapped.clear()

    def report_failure(self, state: str, reason: str) -> None:
        """Tell the launcher why this rank ends. Rank 0 does nothing, because it reports in status.json."""
        if self.is_main:
            return
        print(f"oelm: rank {self.rank}: {reason}", file=sys.stderr, flush=True)
        if RANK_DIR in os.environ:
            report = {"time": time.time(), "rank": self.rank, "state": state, "reason": reason}
            with contextlib.suppress(OSError):
                write_json(Path(os.environ[RANK_DIR]) / f"rank-{self.rank}.json", report)

    # -- collectives ----------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank has called `barrier()`."""
        if self.size > 1:
            dist.barrier()

    def wait_before_exit(self) -> None:
        """Wait until every rank is ready to exit; do not wait for ranks that died.

        torchrun kills all ranks soon after one exits with a nonzero code, even if rank 0 still writes files.
        """
        with contextlib.suppress(RuntimeError):
            self.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of `values`, element by element, over all ranks, in double precision."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on at least one rank."""
        return self.sum([float(flag)])[0] > 0

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    # -- data -----------------------------------------------------------------------------------

    def own_rows(self, rows: int) -> list[int]:
        """Return the indices of the rows that this rank computes, in a batch of `rows` rows.

        The list is never empty, because every rank must take part in averaging the gradients. A rank without
        rows gets row 0, whose loss is ignored; see `has_rows()`.
        """
        return list(range(self.rank, rows, self.size)) or [0]

    def has_rows(self, rows: int) -> bool:
        """Return whether this rank has rows of a batch of `rows` rows; if not, `own_rows()` returns [0]."""
        return self.rank < rows

    def own_batches(self, batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Yield this rank's batches, every `size`-th of `batches`, as (batch, whether the batch counts).

        If the number of batches is not a multiple of `size`, some ranks have no batch at the end. They get
        the batch of rank 0, which does not count, because the ranks of a sharded model must compute
        together.
        """
        batches = iter(batches)
        while group := list(islice(batches, self.size)):
            counts = self.rank < len(group)
            yield group[self.rank if counts else 0], counts

    # -- model ----------------------------------------------------------------------------------

    def place_model(self, model: nn.Module) -> None:
        """Move the model to the device of this rank; call this before the optimizer is built."""
        model.to(self.device)

    def average_gradients(self, module: nn.Module) -> nn.Module:
        """Return `module`, wrapped so that its backward pass averages the gradients over the ranks.

        Call this again whenever parameters are frozen or unfrozen.
        """
        if self.size == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(module, device_ids=ids, **_NO_BUFFER_SYNC)
        self._wrapped.add(wrapped)
        return wrapped

    def sync_gradients(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for the backward pass of one micro-batch.

        Gradients are sent to the other ranks only if this is the last micro-batch of the step.
        """
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        return contextlib.nullcontext()

    def full_params_on_rank0(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `model` has its full parameters on rank 0, for example to save them."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def write_params_on_rank0(self, model: nn.Module) -> Iterator[None]:
        """Let rank 0 change the full parameters in the `with` block; then send them to the other ranks."""
        yield
        if self.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def gather_full_state(self, state: OptimizerState) -> OptimizerState:
        """Return the full optimizer state on rank 0, from all shards; every rank must call this."""
        return state

    def shard_state(self, state: OptimizerState, parameters: Mapping[str, Tensor]) -> OptimizerState:
        """Return this rank's shard of a full optimizer state: the inverse of `gather_full_state()`."""
        return state

    def __str__(self) -> str:
        return f"{self.size} processes" if self.size > 1 else "one process"


def make_world(machine: Machine) -> World:
    """Return the `World` of this process; a `ShardedWorld` if `machine.shard` is set (--shard)."""
    if not machine.shard:
        return World(machine.device)
    from oelm.training.parallel.sharding import ShardedWorld  # imported here, because it takes a second

    return ShardedWorld(machine.device)


def _bind_to_loopback() -> None:
    """Make gloo and NCCL listen on the loopback interface only, unless the user chose another interface.

    Call this only if all ranks are on this machine.
    """
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):  # Linux, macOS
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the torch device `name`; "auto" is GPU number `local_rank` if there is a GPU, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device '{name}'; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device '{name}' was requested, but torch sees no CUDA device; use cpu or auto")
        return torch.device("cuda", local_rank if device.index is None else device.index)
    return device
