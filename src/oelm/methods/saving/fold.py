"""Fold the extras of a method into the matrices that they act on, so that a plain model computes the same.

With low-rank adapter s B A, trainable bias f b, core C and temperature T, a projection computes
y = T C ((W + s B A) x + f b), which one matrix and one bias can represent. The trainable bias can be folded
only if the plain projection has a bias. A convolution over time and a relative bias cannot be folded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.extras.extended import EXTRAS, ExtendedProjection
from oelm.methods.reading.wrappers import unwrap

#: A tensor that folding changed is also stored unchanged, under its key with this prefix. When transformers
#: loads the file, it warns that such keys are unexpected, so the prefix tells the user to load with oelm.
UNFOLDED_PREFIX = "needs_oelm_load."


def folded_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a plain model with the same outputs as `model`, which is not changed.

    After `oelm.apply()`, `model.save_pretrained(folder)` writes this state dict.
    """
    model = unwrap(model)
    if left := unfoldable_parameters(model):
        raise OelmError(
            f"these parameters, which the method added, cannot be folded into a plain model: "
            f"{', '.join(left[:3])}. Use oelm.save instead"
        )
    return fold_all(model)


@torch.no_grad()
def fold_all(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with the extras folded into the matrices, without those that cannot be folded."""
    extras = set(added_parameters(model))
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for module in model.modules():
            if isinstance(module, ExtendedProjection):
                for parameter, folded in folded_parameters(module):
                    before.append((parameter, parameter.data))
                    parameter.data = folded
        return {name: t for name, t in model.state_dict().items() if name not in extras}
    finally:
        for parameter, data in reversed(before):
            parameter.data = data


def unfolded_tensors(model: nn.Module, folded: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `model` that its folded state dict `folded` does not contain.

    These are the parameters that the method added, and the tensors that folding changes. The keys of the
    latter get UNFOLDED_PREFIX.
    """
    own = model.state_dict()
    added = {name: own[name] for name in added_parameters(model)}
    changed = {
        UNFOLDED_PREFIX + n: own[n] for n, t in folded.items() if n in own and not torch.equal(t, own[n])
    }
    return added | changed


def prefer_unfolded(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return a saved state dict in which tensors with UNFOLDED_PREFIX, if any, replace the folded ones."""
    mark = prefix + UNFOLDED_PREFIX
    unfolded = {prefix + k.removeprefix(mark): t for k, t in state.items() if k.startswith(mark)}
    return {k: t for k, t in state.items() if not k.startswith(mark)} | unfolded


def added_parameters(model: nn.Module) -> list[str]:
    """Return the names of all parameters that a method added to the model's architecture."""
    names = []
    for name, module in model.named_modules():
        added: tuple[str, ...] = EXTRAS if isinstance(module, ExtendedProjection) else ()
        if hasattr(module, "add_relative_bias"):
            added = ("relative_bias",)
        present = [extra for extra in added if getattr(module, extra, None) is not None]
        names += [f"{name}.{extra}" if name else extra for extra in present]
    return names


def unfoldable_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that the method added and that cannot be folded."""

    def unfoldable(name: str) -> bool:
        owner, _, own = name.rpartition(".")
        if own == "extra_bias":
            return model.get_submodule(owner).bias is None
        return own in ("conv", "relative_bias")

    return sorted(filter(unfoldable, added_parameters(model)))


def folded_parameters(module: ExtendedProjection) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, folded value) for the weight of a projection, and for its bias if it has one."""
    weight, bias = folded_projection(module)
    yield module.weight, (weight.t() if module.transposed else weight).to(module.weight.dtype).contiguous()
    if module.bias is not None and bias is not None:
        yield module.bias, bias.to(module.bias.dtype)


def folded_projection(module: ExtendedProjection) -> tuple[Tensor, Tensor | None]:
    """Return the weight (rows, d_in) and the bias of an nn.Linear with the same output as `module`.

    Both are at least in float32.
    """
    exact = torch.promote_types(module.weight.dtype, torch.float32)
    weight = (module.weight.t() if module.transposed else module.weight).to(exact)  # (rows, d_in)
    total = module.total_bias()
    bias = None if total is None else total.to(exact)  # (rows,)
    if module.lowrank_a is not None and module.lowrank_b is not None:
        weight = weight + module.lowrank_scale * module.lowrank_b.to(exact) @ module.lowrank_a.to(exact)
    if module.core is not None:
        core = module.core.to(exact).mT
        weight, bias = _apply_per_head(core, weight), None if bias is None else _apply_per_head(core, bias)
    if module.temperature is not None:
        scale = module.temperature.to(exact).repeat_interleave(module.head_dim)  # (rows,)
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    return weight, bias


def _apply_per_head(matrices: Tensor, rows: Tensor) -> Tensor:
    """Return a weight or bias in which the rows of each head are multiplied by that head's matrix.

    `matrices` (H, hs, hs) has one matrix per head.
    """
    heads = rows.reshape(*matrices.shape[:2], -1)  # (H, hs, d_in) or (H, hs, 1)
    return (matrices @ heads).reshape(rows.shape)
