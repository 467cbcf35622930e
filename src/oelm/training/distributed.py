"""One run over many processes (torchrun): the same global batch, one writer.

Every process plans every batch and takes its share of the rows, so nothing about the data has to be sent.
Every process holds the whole network here (DistributedDataParallel), a part of it in sharding.py. Only
gradients of what trains are averaged: frozen tensors have none, and neither way knows them.
Without torchrun there is one process, and every call here is the identity.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oelm.errors import UsageError
from oelm.training.config import Machine

T = TypeVar("T")
TensorsByName = dict[str, dict[str, Tensor]]  # of each parameter: its optimizer state


class World:
    """The processes of this run. `main` is the one that writes."""

    def __init__(self, wish: str = "auto") -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.device = choose_device(wish, int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0)
        self._joined = False

    @property
    def main(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> World:
        if self.size > 1 and not dist.is_initialized():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            # Long, because the first process may tokenise a whole corpus while the others wait for it.
            dist.init_process_group(backend, timeout=datetime.timedelta(hours=12))
            self._joined = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._joined:
            dist.destroy_process_group()
            self._joined = False

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

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in the order of their ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

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
        return DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False)

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
    from oelm.training.sharding import ShardedWorld  # FSDP takes a second to import, which few runs need

    return ShardedWorld(machine.device)


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
