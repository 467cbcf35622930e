"""A network that is divided between processes (FSDP2), for those too large for one device.

Each process holds its part of the rows of every tensor, of its gradient and of the optimizer's state. A
layer is put together just before it computes and forgotten right after, forward and backward, so that
between calls a parameter is always this process' part (a DTensor). What is frozen is divided like the rest;
without a gradient there is nothing of it to send.

Files know nothing of it: they are written from whole tensors, and any number of processes reads them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from oelm.errors import OelmError, UsageError
from oelm.methods.reading.find import qk_projections
from oelm.methods.reading.projection import full_tensor
from oelm.training.parallel.world import TensorsByName, World


class ShardedWorld(World):
    """The processes of a run that hold one network between them."""

    def __init__(self, wish: str = "auto") -> None:
        super().__init__(wish)
        if self.size == 1:
            raise UsageError("--shard divides a network between processes, and this run has only one")

    def place(self, model: nn.Module) -> None:
        """Divide the network layer by layer; what lies outside the layers forms one group."""
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            raise OelmError(f"{scalars[0]} is one number, which cannot be divided: train without --shard")
        mesh = init_device_mesh(self.device.type, (self.size,))
        layers = dict.fromkeys(p.place.module for p in qk_projections(model) if p.place.stack)
        for part in (*map(model.get_submodule, layers), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        for name in getattr(model, "entry_points", ()):  # FSDP knows only `forward` by itself
            register_fsdp_forward_method(model, name)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The layers average their gradients themselves, after every micro-batch: to hold whole ones until
        the last would undo the division."""
        return module

    @contextlib.contextmanager
    def undivided(self, model: nn.Module) -> Iterator[None]:
        """Within, `main` sees an ordinary network: whole tensors on the CPU, and the classes it was made of.

        The other processes help to put it together and see their parts as before.
        """
        gathered = [(p, self._whole_on_main(p)) for p in model.parameters()]  # in step with the others
        ordinary = {id(p): nn.Parameter(t, p.requires_grad) for p, t in gathered if t is not None}
        modules = list(model.modules()) if self.main else []
        slots = [
            (m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        classes = [(m, type(m)) for m in modules if isinstance(m, FSDPModule)]
        hooks = [(m, m._load_state_dict_post_hooks) for m in modules]  # FSDP's, which look for its parts
        try:
            for held, name, p in slots:
                held[name] = ordinary[id(p)]
            for sharded, divided in classes:
                sharded.__class__ = divided.__bases__[1]  # of (FSDPModule, the class it was)
            for module, _ in hooks:
                module._load_state_dict_post_hooks = OrderedDict()
            yield
        finally:
            for module, found in hooks:
                module._load_state_dict_post_hooks = found
            for sharded, divided in classes:
                sharded.__class__ = divided
            for held, name, p in slots:
                held[name] = p

    @contextlib.contextmanager
    def rewriting(self, model: nn.Module) -> Iterator[None]:
        written: list[Tensor | None]
        with self.undivided(model):
            yield
            written = [p.detach() if self.main else None for p in model.parameters()]
        for p, tensor in zip(model.parameters(), written, strict=True):
            full = torch.empty(p.shape, dtype=p.dtype, device=self.device)  # one at a time: all may not fit
            if tensor is not None:
                full.copy_(tensor)
            dist.broadcast(full, 0)
            _local(p).copy_(self._rows(full))
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def whole(self, state: TensorsByName) -> TensorsByName:
        found: TensorsByName = {}
        for name, values in state.items():
            gathered = {key: self._whole_on_main(value) for key, value in values.items()}
            found[name] = {key: tensor for key, tensor in gathered.items() if tensor is not None}
        return found

    def own(self, state: TensorsByName, parameters: Mapping[str, Tensor]) -> TensorsByName:
        return {
            name: {key: self._part(value, parameters.get(name)) for key, value in values.items()}
            for name, values in state.items()
        }

    def _whole_on_main(self, tensor: Tensor) -> Tensor | None:
        full = full_tensor(tensor.detach())
        return full.to("cpu", copy=True) if self.main else None

    def _part(self, full: Tensor, parameter: Tensor | None) -> Tensor:
        """This process' part of what is divided as its parameter is; a count of steps is not."""
        if parameter is None or parameter.shape != full.shape:
            return full
        part = torch.empty_like(parameter.detach())
        _local(part).copy_(self._rows(full))
        return part

    def _rows(self, full: Tensor) -> Tensor:
        pieces = full.chunk(self.size)
        return pieces[self.rank] if self.rank < len(pieces) else full[:0]  # fewer rows than processes

    def __str__(self) -> str:
        return f"{self.size} processes with a part of the network each"


def _local(tensor: Tensor) -> Tensor:
    """The memory of this process' part."""
    held = tensor.detach()
    assert isinstance(held, DTensor)
    return held.to_local()
