"""Shard a model that does not fit on one device over the ranks, with FSDP2.

Each rank has some rows of every parameter, gradient and optimizer state, as DTensors. FSDP gathers the
parameters of a layer just before the layer computes, and frees them afterwards. Frozen parameters are sharded
too, but have no gradients to send. Checkpoints and saved models contain full tensors, so they can be loaded
with any number of ranks.
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
    """The ranks of a run, each of which has only a part (shard) of the model."""

    def __init__(self, device: str = "auto") -> None:
        super().__init__(device)
        if self.size == 1:
            raise UsageError("--shard needs several processes, but this run has only one: leave out --shard")

    def place_model(self, model: nn.Module) -> None:
        """Shard the model: one FSDP group per layer, and one group for all parameters outside the layers."""
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            raise OelmError(
                f"the parameter {scalars[0]} is a scalar, which FSDP cannot shard: leave out --shard"
            )
        mesh = init_device_mesh(self.device.type, (self.size,))
        layers = dict.fromkeys(p.place.module for p in qk_projections(model) if p.place.stack)
        for part in (*map(model.get_submodule, layers), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        # FSDP gathers the parameters only for `forward()` and for registered methods, so register the others.
        for name in getattr(model, "entry_points", ()):
            register_fsdp_forward_method(model, name)

    def average_gradients(self, module: nn.Module) -> nn.Module:
        """Return `module` unchanged, because FSDP itself averages the gradients, after every micro-batch.

        Averaging only after the last micro-batch would need memory for full gradients, which sharding saves.
        """
        return module

    @contextlib.contextmanager
    def full_params_on_rank0(self, model: nn.Module) -> Iterator[None]:
        """Make `model` unsharded on rank 0 in the `with` block: full CPU tensors and original module classes.

        On the other ranks, which must call this too, the model stays sharded.
        """
        # Gathering is a collective operation: all ranks gather the parameters in the same order.
        gathered = [(p, self._full_on_rank0(p)) for p in model.parameters()]
        full = {id(p): nn.Parameter(t, p.requires_grad) for p, t in gathered if t is not None}
        modules = list(model.modules()) if self.is_main else []
        slots = [
            (m._parameters, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        classes = [(m, type(m)) for m in modules if isinstance(m, FSDPModule)]
        # FSDP's load_state_dict hooks expect DTensors, so they are removed while the tensors are full.
        hooks = [(m, m._load_state_dict_post_hooks) for m in modules]
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
            # Broadcast one parameter after the other, so that only one full parameter is in memory.
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
        """Return this rank's shard of the optimizer state `full` of `parameter`.

        State with a different shape than the parameter, such as a step count, is returned unsharded.
        """
        if parameter is None or parameter.shape != full.shape:
            return full
        part = torch.empty_like(parameter.detach())
        _local(part).copy_(self._shard(full))
        return part

    def _shard(self, full: Tensor) -> Tensor:
        pieces = full.chunk(self.size)
        # If the tensor has fewer rows than there are ranks, the last ranks get an empty shard.
        return pieces[self.rank] if self.rank < len(pieces) else full[:0]

    def __str__(self) -> str:
        return f"{self.size} processes, model sharded"


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor as a plain tensor, without a copy."""
    held = tensor.detach()
    assert isinstance(held, DTensor)
    return held.to_local()
