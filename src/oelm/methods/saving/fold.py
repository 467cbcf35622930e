"""What a method added, folded into the matrices it was added to, for formats that know only those.

A residue, a core and a temperature are linear: y = D C (W + s B A) x + ... is one matrix and one bias. A
convolution over time and a relative bias are not, and are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.extras.projection import EXTRAS, ExtendedProjection
from oelm.methods.reading.wrappers import unwrap


@torch.no_grad()
def folded_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain model that computes what this one does; the model stays as it is.

    `model.save_pretrained(folder)` after `oelm.apply` writes it by itself.
    """
    model = unwrap(model)
    if left := unfoldable(model):
        raise OelmError(
            f"no plain matrix can hold what this model's method adds: {', '.join(left[:3])}. "
            f"Use oelm.save instead"
        )
    extras = set(added_parameters(model))
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for module in model.modules():
            if isinstance(module, ExtendedProjection):
                for parameter, folded in _folded(module):
                    before.append((parameter, parameter.data))
                    parameter.data = folded
        return {name: t for name, t in model.state_dict().items() if name not in extras}
    finally:
        for parameter, data in reversed(before):
            parameter.data = data


def added_parameters(model: nn.Module) -> list[str]:
    """The names of all parameters in this model that a method added to its architecture."""
    names = []
    for name, module in model.named_modules():
        added: tuple[str, ...] = EXTRAS if isinstance(module, ExtendedProjection) else ()
        if hasattr(module, "add_relative_bias"):
            added = ("relative_bias",)
        names += [
            f"{name}.{part}" if name else part for part in added if getattr(module, part, None) is not None
        ]
    return names


def unfoldable(model: nn.Module) -> list[str]:
    """Those that no matrix of the plain architecture can absorb."""
    return sorted(n for n in added_parameters(model) if n.rpartition(".")[2] in ("conv", "relative_bias"))


def _folded(module: ExtendedProjection) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The weight and the bias of the plain projection that does the same, where they are others."""
    exact = torch.promote_types(module.weight.dtype, torch.float32)
    weight = (module.weight.t() if module.transposed else module.weight).to(exact)  # (rows, d_in)
    bias = None if module.bias is None else module.bias.to(exact)
    if module.lowrank_a is not None and module.lowrank_b is not None:
        weight = weight + module.lowrank_scale * module.lowrank_b.to(exact) @ module.lowrank_a.to(exact)
    if module.core is not None:
        core = module.core.to(exact).mT
        weight, bias = _by_head(core, weight), None if bias is None else _by_head(core, bias)
    if module.temperature is not None:
        scale = module.temperature.to(exact).repeat_interleave(module.head_dim)  # (rows,)
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    yield module.weight, (weight.t() if module.transposed else weight).to(module.weight.dtype).contiguous()
    if module.bias is not None and bias is not None:
        yield module.bias, bias.to(module.bias.dtype)


def _by_head(matrices: Tensor, rows: Tensor) -> Tensor:
    """A matrix per head, (H, hs, hs), applied to its rows of a weight or bias."""
    heads = rows.reshape(*matrices.shape[:2], -1)  # (H, hs, d_in) or (H, hs, 1)
    return (matrices @ heads).reshape(rows.shape)
