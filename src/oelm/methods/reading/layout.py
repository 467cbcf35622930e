"""How several projections share the rows of one weight, and one projection's window into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is divided between processes (FSDP): every one of them must ask for it.

    Any other tensor is whole already."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


@dataclass(frozen=True)
class Layout:
    """Rows of a fused weight: `groups` repeats of one piece per part, `sizes` rows of each part in all.

    groups = 1 is the block layout [q; k; v] (GPT-2, ModernBERT, Phi-3); one group per head is the
    interleaved one (GPT-NeoX); one per key head is the grouped one [several q, k, v] (Falcon).
    """

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts (..., size_i) -> (..., sum of sizes), in the model's own order."""
        if self.groups == 1:
            return torch.cat(list(parts), dim=-1)
        return torch.cat([p.unflatten(-1, (self.groups, -1)) for p in parts], dim=-1).flatten(-2)

    def split(self, fused: Tensor) -> list[Tensor]:
        """The inverse of `join`."""
        pieces = [size // self.groups for size in self.sizes]
        parts = fused.unflatten(-1, (self.groups, -1)).split(pieces, dim=-1)
        return [p.flatten(-2) for p in parts]

    def window(self, role: str) -> tuple[int, int]:
        """First row and number of rows of `role` within one group."""
        index = self.roles.index(role)
        pieces = [size // self.groups for size in self.sizes]
        return sum(pieces[:index]), pieces[index]


@dataclass(frozen=True)
class Window:
    """One projection's part of a parameter: all of it, or the rows that a layout gives to a role."""

    owner: nn.Module
    attribute: str
    transposed: bool = False  # stored (in, out) as transformers' Conv1D does, or (in, heads, head size)
    layout: Layout | None = None
    role: str = ""

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.owner, self.attribute)

    @property
    def rows(self) -> int:
        """Output features of this part; known without looking at any number."""
        if self.layout is None:
            return self._all_rows
        return self.layout.sizes[self.layout.roles.index(self.role)]

    @property
    def size(self) -> int:
        return self.parameter.numel() // self._all_rows * self.rows

    @property
    def _all_rows(self) -> int:
        shape = self.parameter.shape
        return math.prod(shape[1:]) if self.transposed else shape[0]

    def view(self) -> Tensor:
        """(groups, rows per group, ...) of the live parameter, writable."""
        return self.cut(self.parameter.detach())

    def values(self) -> Tensor:
        """The same to look at only, also where processes hold a part of the parameter each."""
        return self.cut(whole(self.parameter.detach()))

    def cut(self, tensor: Tensor) -> Tensor:
        """The same rows of any tensor of the parameter's shape, such as a gradient; a view where possible."""
        tensor = tensor.flatten(1).t() if self.transposed else tensor
        if self.layout is None:
            return tensor[None]
        first, count = self.layout.window(self.role)
        return tensor.unflatten(0, (self.layout.groups, -1))[:, first : first + count]

    def write(self, values: Tensor) -> None:
        view = self.view()
        view.copy_(values.reshape(view.shape))
