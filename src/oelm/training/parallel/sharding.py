"""Shard a model that does not fit on one device over the ranks, with FSDP2.

Each rank holds its rows of every parameter, gradient and optimizer state as a DTensor. FSDP gathers a layer
just before it computes and frees it afterwards. Frozen parameters are sharded too, but have no gradients to
send. Checkpoints and saved models hold full tensors, so they can be loaded with any number of ranks.
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
from oelm.training.optimizer import OptimizerState
from oelm.training.parallel.world import World


class ShardedWorld(World):
    """The ranks of a run, each of which holds a part (shard) of one model."""

    def __init__(self, device: str = "auto") -> None:
        super().__init__(device)
        if self.size == 1:
            raise UsageError("--shard needs several processes, but this run has one; leave out --shard")

    def place_model(self, model: nn.Module) -> None:
        """Shard each layer as its own FSDP group, and everything outside the layers as one more group."""
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            raise OelmError(f"{scalars[0]} is a scalar, which FSDP cannot shard; train without --shard")
        mesh = init_device_mesh(self.device.type, (self.size,))
        layers = dict.fromkeys(p.place.module for p in qk_projections(model) if p.place.stack)
        for part in (*map(model.get_submodule, layers), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        # Without registration, FSDP gathers the parameters only for `forward`.
        for name in getattr(model, "entry_points", ()):
            register_fsdp_forward_method(model, name)

    def average_gradients(self, module: nn.Module) -> nn.Module:
        """Return `module` unchanged: FSDP averages gradients after every micro-batch.

        Keeping full gradients until the last micro-batch would need the memory that sharding saves.
        """
        return module

    @contextlib.contextmanager
    def full_params_on_rank0(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which rank 0 sees a plain model: full CPU tensors and the original classes.

        The other ranks take part in the gathering and keep their shards.
        """
        gathered = [(p, self._full_on_rank0(p)) for p in model.parameters()]  # same order on all ranks
        full = {id(p): nn.Parameter(t, p.requires_grad) for p, t in gathered if t is not None}
        modules = list(model.modules()) if self.is_main else []
        slots = [
            (m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        classes = [(m, type(m)) for m in modules if isinstance(m, FSDPModule)]
        hooks = [(m, m._load_state_dict_post_hooks) for m in modules]  # FSDP's hooks expect DTensors
        try:
            for held, name, p in slots:
                held[name] = full[id(p)]
            for sharded, fsdp_class in classes:
                sharded.__class__ = fsdp_class.__bases__[1]  # bases are (FSDPModule, the original class)
            for module, _ in hooks:
                module._load_state_dict_post_hooks = OrderedDict()
            yield
        finally:
            for module, found in hooks:
                module._load_state_dict_post_hooks = found
            for sharded, fsdp_class in classes:
                sharded.__class__ = fsdp_class
            for held, name, p in slots:
                held[name] = p

    @contextlib.contextmanager
    def write_params_on_rank0(self, model: nn.Module) -> Iterator[None]:
        written: list[Tensor | None]
        with self.full_params_on_rank0(model):
            yield
            written = [p.detach() if self.is_main else None for p in model.parameters()]
        for p, tensor in zip(model.parameters(), written, strict=True):
            # Only one full parameter exists at a time, to save memory.
            full = torch.empty(p.shape, dtype=p.dtype, device=self.device)
            if tensor is not None:
                full.copy_(tensor)
            dist.broadcast(full, 0)
            _local(p).copy_(self._shard(full))
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def gather_full_state(self, state: OptimizerState) -> OptimizerState:
        found: OptimizerState = {}
        for name, values in state.items():
            gathered = {key: self._full_on_rank0(value) for key, value in values.items()}
            found[name] = {key: tensor for key, tensor in gathered.items() if tensor is not None}
        return found

    def shard_state(self, state: OptimizerState, parameters: Mapping[str, Tensor]) -> OptimizerState:
        return {
            name: {key: self._shard_like(value, parameters.get(name)) for key, value in values.items()}
            for name, values in state.items()
        }

    def _full_on_rank0(self, tensor: Tensor) -> Tensor | None:
        full = full_tensor(tensor.detach())
        return full.to("cpu", copy=True) if self.is_main else None

    def _shard_like(self, full: Tensor, parameter: Tensor | None) -> Tensor:
        """Return this rank's shard of `full`; state of another shape, like a step count, is not sharded."""
        if parameter is None or parameter.shape != full.shape:
            return full
        part = torch.empty_like(parameter.detach())
        _local(part).copy_(self._shard(full))
        return part

    def _shard(self, full: Tensor) -> Tensor:
        pieces = full.chunk(self.size)
        # With fewer rows than ranks, the last ranks get an empty shard.
        return pieces[self.rank] if self.rank < len(pieces) else full[:0]

    def __str__(self) -> str:
        return f"{self.size} processes, model sharded"


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, without a copy."""
    held = tensor.detach()
    assert isinstance(held, DTensor)
    return held.to_local()
