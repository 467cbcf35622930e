"""One run over many processes: the same global batch, one writer.

Every process plans every batch and takes its share of the rows, so nothing about the data has to be sent.
Every process holds the whole network here (DistributedDataParallel), a part of it in sharding.py. Only
gradients of what trains are averaged: frozen tensors have none, and neither way knows them.
The processes ("ranks") are started by `oelm.experiments.launch.ranks` or by a torchrun of the user's own.
Without either there is one process, and every call here is the identity.
"""

from __future__ import annotations

import contextlib
import datetime
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
from oelm.training.signals import RANK_DIR

T = TypeVar("T")
# Long, because rank 0 may tokenise a whole corpus while the others wait for it.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=12)
TensorsByName = dict[str, dict[str, Tensor]]  # of each parameter: its optimizer state


class World:
    """The processes of this run. `main` is the one that writes."""

    def __init__(self, wish: str = "auto") -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.device = choose_device(wish, int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0)
        self._joined = False
        self._wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    @property
    def main(self) -> bool:
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
        if RANK_DIR not in os.environ:  # torchrun: its environment says where the store is
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
            return
        # A store in a private file, because a TCPStore listens on every network interface.
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
        """Free what DDP holds of the process group while the group still lives.

        DDP's C++ Reducer is freed with the GIL held. Were it the last owner of the process group, it would
        join gloo's thread, which may itself wait for the GIL: a deadlock. A traceback can keep the DDP module
        alive, so its members are dropped here and not left to the garbage collector.
        """
        for module in self._wrapped:
            module.reducer = module.logger = module.process_group = None  # type: ignore[assignment]
        self._wrapped.clear()

    def leave_together(self) -> None:
        """Wait until every rank has done its work: torchrun ends all ranks soon after one exits with a code
        other than 0, and rank 0 may still be writing. A peer that has died no longer matters."""
        if self.size > 1:
            with contextlib.suppress(RuntimeError):
                dist.barrier()

    def report_failure(self, state: str, reason: str) -> None:
        """Tell the process that started this rank why it ends. Rank 0 writes to the run folder instead."""
        if self.main:
            return
        print(f"oelm: rank {self.rank}: {reason}", file=sys.stderr, flush=True)
        if RANK_DIR in os.environ:
            report = {"time": time.time(), "rank": self.rank, "state": state, "reason": reason}
            with contextlib.suppress(OSError):
                write_json(Path(os.environ[RANK_DIR]) / f"rank-{self.rank}.json", report)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added over all processes, in double precision."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The one-dimensional `tensors` of every rank, in rank order; lengths may differ between ranks."""
        if self.size == 1:
            return [dict(tensors)]
        by_name = {name: self._gather(tensor) for name, tensor in tensors.items()}
        return [{name: parts[rank] for name, parts in by_name.items()} for rank in range(self.size)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        count = torch.tensor([len(tensor)], device=self.device)
        counts = [torch.zeros_like(count) for _ in range(self.size)]
        dist.all_gather(counts, count)
        padded = torch.zeros(max(map(int, counts)), dtype=tensor.dtype, device=self.device)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[: int(n)].to(tensor.device, copy=True) for part, n in zip(parts, counts, strict=True)]

    def share(self, rows: int) -> list[int]:
        """This process' rows of a batch; never empty, since every process must take part in the averaging."""
        return list(range(self.rank, rows, self.size)) or [0]

    def has_share(self, rows: int) -> bool:
        """Whether the rows of `share` count, or only fill the place of a process left without any."""
        return self.rank < rows

    def deal(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """This process' items, each with whether it counts: the last round is filled up with its first one,
        since the processes of a divided network only compute together."""
        items = iter(items)
        while dealt := list(islice(items, self.size)):
            counts = self.rank < len(dealt)
            yield dealt[self.rank if counts else 0], counts

    def place(self, model: nn.Module) -> None:
        """Bring a network to where it trains, before anything refers to its parameters."""
        model.to(self.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose backward pass averages gradients over processes. Made anew when tensors thaw."""
        if self.size == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)
        self._wrapped.add(wrapped)
        return wrapped

    def reducing(self, module: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around each micro-batch: gradients add up locally, and only the last one's backward pass sends."""
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        return contextlib.nullcontext()

    def undivided(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Around what `main` alone does with the whole network, such as saving it."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def rewriting(self, model: nn.Module) -> Iterator[None]:
        """Around what `main` alone writes into the whole network; then every process gets its weights."""
        yield
        if self.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def whole(self, state: TensorsByName) -> TensorsByName:
        """Optimizer state as one process would hold it, on `main`; every process must ask."""
        return state

    def own(self, state: TensorsByName, parameters: Mapping[str, Tensor]) -> TensorsByName:
        """The reverse of `whole`: what this process keeps of it."""
        return state

    def __str__(self) -> str:
        return f"{self.size} processes" if self.size > 1 else "one process"


def world_of(machine: Machine) -> World:
    """The processes as the machine wants them to work together."""
    if not machine.shard:
        return World(machine.device)
    from oelm.training.parallel.sharding import (
        ShardedWorld,  # FSDP takes a second to import, which few runs need
    )

    return ShardedWorld(machine.device)


def _bind_to_loopback() -> None:
    """All ranks run on this machine: their sockets listen on loopback only, unless the user named another."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):  # Linux, macOS
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def choose_device(wish: str, local_rank: int = 0) -> torch.device:
    """ "auto" is the process' own GPU where there is one, the CPU otherwise."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise UsageError(f"unknown device '{wish}'; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device '{wish}' was asked for, but torch sees no CUDA device; use cpu or auto")
        return torch.device("cuda", local_rank if device.index is None else device.index)
    return device
