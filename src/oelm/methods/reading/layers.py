"""Where in the depth of a model a module stands: which stack, which layer, of how many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Place:
    """Layer `layer` (from 0 at the input) of `depth` in the stack named `stack`; its module is `module`."""

    stack: str
    layer: int
    depth: int
    module: str


def places(model: nn.Module, names: Iterable[str]) -> dict[str, Place]:
    """The place of each named module; the names together define what the layers are.

    A stack is a ModuleList or Sequential of like modules ("encoder.layers", "decoder.layers"); the layer
    is the position in it. Lists of unlike modules (a T5 block's attention and MLP) are not layers; lists
    within lists (stages of blocks) are counted through. A module outside any list is a layer of its own.
    """
    paths = {name: _path(model, name) for name in names}
    stacks: dict[str, list[tuple[int, ...]]] = {}
    for order, (name, (stack, path, _)) in enumerate(paths.items()):
        if not path:
            paths[name] = (stack, (order,), name)
        known = stacks.setdefault(stack, [])
        if paths[name][1] not in known:
            known.append(paths[name][1])
    for known in stacks.values():
        known.sort()
    return {
        name: Place(stack, stacks[stack].index(path), len(stacks[stack]), module)
        for name, (stack, path, module) in paths.items()
    }


def _path(model: nn.Module, name: str) -> tuple[str, tuple[int, ...], str]:
    """On the way to `name`: the outermost list, the positions in lists of like modules, the last member."""
    stack, positions, member, here, walked = "", [], "", model, ""
    for step in name.split(".") if name else []:
        in_list = isinstance(here, (nn.ModuleList, nn.Sequential)) and len({type(m) for m in here}) == 1
        above, walked = walked, f"{walked}.{step}" if walked else step
        if in_list:
            stack, member = stack or above, walked
            positions.append(int(step))
        here = getattr(here, step)
    return stack, tuple(positions), member
