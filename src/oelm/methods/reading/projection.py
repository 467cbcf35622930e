"""Data classes that describe projections: in which layer they are, and where their weights are stored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.reading.wrappers import base_layer


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a tensor that FSDP has sharded; return any other tensor unchanged.

    All ranks must call this, because it gathers the shards.
    """
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def is_matrix(module: object) -> bool:
    """Return whether a module is an nn.Linear, transformers' Conv1D, or oelm's ExtendedProjection."""
    if isinstance(module, nn.Module):
        module = base_layer(module)
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "ExtendedProjection")


def is_transposed(module: object) -> bool:
    """Return whether a module stores its weight as (in, out), as transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D" or bool(getattr(module, "transposed", False))


def is_projection(module: object) -> bool:
    """Return whether a module can be a query or key projection: a matrix, or a convolution.

    A depthwise convolution does not count, because it mixes positions, not features.
    """
    inner = base_layer(module) if isinstance(module, nn.Module) else module
    if isinstance(inner, nn.Conv1d | nn.Conv2d):
        return not is_depthwise(inner)
    return is_matrix(inner)


def is_depthwise(module: object) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == module.in_channels > 1


def names_by_module(model: nn.Module) -> dict[int, list[str]]:
    """Return a dict from id(module) to all names of that module; a shared module has several."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


@dataclass(frozen=True)
class Place:
    """The position of a layer: index `layer` (0 is nearest to the input) of `depth` layers in `stack`.

    `stack` is the name of the list of layers, `module` the name of the layer itself. If the same layer is
    in the model several times, `others` are its further positions.
    """

    stack: str
    layer: int
    depth: int
    module: str
    others: tuple[Place, ...] = ()


def layer_places(model: nn.Module, names: Iterable[str]) -> dict[str, Place]:
    """Return a dict from the name of each module to the position of its layer.

    A stack is a ModuleList or Sequential whose members have one type, such as "encoder.layers". The index of
    a member in the stack is its layer number. Lists of mixed types (such as the list of attention and MLP in
    a T5 block) are not stacks. The layers of nested lists (stages that contain blocks) are numbered
    consecutively. A module outside any stack counts as a layer of its own. A list of the named modules inside
    a layer (one attention module per head) is not a stack either: all of them are in that layer. A module
    in several layers has the position of the first; the others are in `Place.others`.
    """
    all_names = names_by_module(model)
    paths: dict[str, list[tuple[str, tuple[int, ...], str]]] = {}
    stacks: dict[str, set[tuple[int, ...]]] = {}
    for order, name in enumerate(names):
        found = [_stack_path(model, other) for other in all_names[id(model.get_submodule(name))]]
        paths[name] = [(s, path, module) for s, path, module in found if path] or [("", (order,), name)]
        for stack, path, _ in paths[name]:
            stacks.setdefault(stack, set()).add(path)
    ordered = {stack: sorted(known) for stack, known in stacks.items()}
    places = {}
    for name, found in paths.items():
        first, *others = [Place(s, ordered[s].index(path), len(ordered[s]), m) for s, path, m in found]
        places[name] = dataclasses.replace(first, others=tuple(others))
    return places


_LISTS = (nn.ModuleList, nn.Sequential)


def is_stack(module: nn.Module) -> bool:
    """Return whether a module is a list of modules of one type, such as the layers of a model."""
    return isinstance(module, _LISTS) and len({type(member) for member in module}) == 1


def _stack_path(model: nn.Module, name: str) -> tuple[str, tuple[int, ...], str]:
    """Return where the module `name` is in the stacks of layers that contain it; the indices are () if none.

    The result is (name of the outermost stack, index in each nested stack, name of the innermost layer), such
    as ("stages", (1, 4), "stages.1.blocks.4").
    """
    indices: list[int] = []
    stack, member, module, walked = "", "", model, ""
    holder = model  # contains `module`
    for step in name.split(".") if name else []:
        above, walked = walked, f"{walked}.{step}" if walked else step
        in_layer = bool(indices) and walked == name and not isinstance(holder, _LISTS)
        if is_stack(module) and not in_layer:
            stack, member = stack or above, walked
            indices.append(list(module._modules).index(step))  # the keys of a Sequential need not be numbers
        holder, module = module, getattr(module, step)
    return stack, tuple(indices), member


@dataclass(frozen=True)
class RowLayout:
    """The row order of a fused weight: a number of groups, each with a block of rows for every role.

    The roles are "q", "k" and "v" or some of them; `sizes` is the total number of rows of each role. With one
    group, the order is [q; k; v] (GPT-2, ModernBERT, Phi-3); with one group per head, [q1; k1; v1; q2; ...]
    (GPT-NeoX); with one group per key head, [several q; k; v; ...] (Falcon).
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the fused tensor (..., sum of sizes) made from one tensor (..., size) per role."""
        if self.groups == 1:
            return torch.cat(list(parts), dim=-1)
        return torch.cat([p.unflatten(-1, (self.groups, -1)) for p in parts], dim=-1).flatten(-2)

    def split(self, fused: Tensor) -> list[Tensor]:
        """Return one tensor (..., size) per role from a fused tensor; this is the inverse of `join()`."""
        sizes = [size // self.groups for size in self.sizes]
        parts = fused.unflatten(-1, (self.groups, -1)).split(sizes, dim=-1)
        return [p.flatten(-2) for p in parts]

    def rows_in_group(self, role: str) -> tuple[int, int]:
        """Return (first row, number of rows) of `role` within one group."""
        index = self.roles.index(role)
        sizes = [size // self.groups for size in self.sizes]
        return sum(sizes[:index]), sizes[index]


@dataclass(frozen=True)
class ParameterSlice:
    """The rows of a parameter that belong to one projection.

    These are all rows if `layout` is None, otherwise the rows of `role` in the fused parameter.
    """

    owner: nn.Module
    attribute: str
    transposed: bool = False  # stored as (in, out) like transformers' Conv1D, or as (in, heads, head_dim)
    layout: RowLayout | None = None
    role: str = ""

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.owner, self.attribute)

    @property
    def rows(self) -> int:
        """The number of output features, computed from shapes only, so that it works on the meta device."""
        if self.layout is None:
            return self._all_rows
        return self.layout.sizes[self.layout.roles.index(self.role)]

    @property
    def size(self) -> int:
        return self.parameter.numel() // self._all_rows * self.rows

    @property
    def _all_rows(self) -> int:
        """The number of output features of the whole stored tensor, which may contain other roles, too."""
        shape = self.parameter.shape
        return math.prod(shape[1:]) if self.transposed else shape[0]

    def view(self) -> Tensor:
        """Return a writable view of the rows of this slice, as (groups, rows per group, ...)."""
        return self.cut(self.parameter.detach())

    def values(self) -> Tensor:
        """Return the values of this slice, gathered from all ranks if the parameter is sharded."""
        return self.cut(full_tensor(self.parameter.detach()))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the rows of this slice from a tensor with the parameter's shape, such as its gradient."""
        tensor = tensor.flatten(1).t() if self.transposed else tensor
        if self.layout is None:
            return tensor[None]
        first, count = self.layout.rows_in_group(self.role)
        return tensor.unflatten(0, (self.layout.groups, -1))[:, first : first + count]

    def write(self, values: Tensor) -> None:
        if self.transposed and self.parameter.dim() > 2 and not self.parameter.is_contiguous():
            raise OelmError(
                f"the {self.attribute} of {type(self.owner).__name__} cannot be changed in place, because "
                "its memory is not contiguous: call .contiguous() on its data first"
            )
        view = self.view()
        view.copy_(values.reshape(view.shape))


@dataclass(frozen=True)
class Projection:
    """One query or key projection of one attention module."""

    name: str  # the same before and after a fused weight is split
    role: str  # "q" or "k"
    num_heads: int
    head_dim: int
    place: Place
    attention: nn.Module
    attention_name: str
    weight: ParameterSlice
    bias: ParameterSlice | None

    def heads(self) -> Tensor:
        """Return the weights, detached and reshaped to (num_heads, head_dim, d_in)."""
        return self.weight.values().reshape(self.num_heads, self.head_dim, -1)

    @property
    def fused(self) -> bool:
        """Whether the projection is part of a fused parameter, which must be split before freezing."""
        return self.weight.layout is not None or (self.bias is not None and self.bias.layout is not None)

    @property
    def slices(self) -> list[ParameterSlice]:
        """The weight, and the bias if there is one."""
        return [s for s in (self.weight, self.bias) if s is not None]

    def __str__(self) -> str:
        return f"{self.name} ({self.role}, {self.num_heads} heads x {self.head_dim})"


@dataclass(frozen=True)
class FeedForward:
    """One matrix of a feed-forward block."""

    name: str
    place: Place
    weight: ParameterSlice
    bias: ParameterSlice | None
