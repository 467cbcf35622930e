"""What a method added, folded into the matrices it was added to, for formats that know only those.

A residue, a core and a temperature are linear: y = D C (W + s B A) x + ... is one matrix and one bias. A
convolution over time and a relative bias are not, and are refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.projection import ExtendedProjection
from oelm.methods.readers import unwrap
from oelm.methods.record import record_of


@torch.no_grad()
def folded_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain model that computes what this one does; the model stays as it is.

    For example `model.save_pretrained(folder, state_dict=oelm.folded_state(model))`, which transformers then
    loads without oelm.
    """
    model = unwrap(model)
    record = record_of(model)
    extras = set(record.extras) if record is not None else set()
    stubborn = sorted(name for name in extras if name.rpartition(".")[2] in ("conv", "relative_bias"))
    if stubborn:
        raise OelmError(
            f"method '{record.method.name if record else ''}' adds what no plain matrix can hold: "
            f"{', '.join(stubborn[:3])}. Use oelm.save instead"
        )
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for module in model.modules():
            if isinstance(module, ExtendedProjection):
                weight, bias = _folded(module)
                for parameter, folded in ((module.weight, weight), (module.bias, bias)):
                    if parameter is not None and folded is not None:
                        before.append((parameter, parameter.data))
                        parameter.data = folded
        return {name: t for name, t in model.state_dict().items() if name not in extras}
    finally:
        for parameter, data in before:
            parameter.data = data


def _folded(module: ExtendedProjection) -> tuple[Tensor, Tensor | None]:
    """Weight (as stored) and bias of the plain projection that does the same."""
    weight = (module.weight.t() if module.transposed else module.weight).float()  # (rows, d_in)
    bias = None if module.bias is None else module.bias.float()
    if module.lowrank_a is not None and module.lowrank_b is not None:
        weight = weight + module.lowrank_scale * module.lowrank_b.float() @ module.lowrank_a.float()
    if module.core is not None:
        core = module.core.float().mT
        weight, bias = _by_head(core, weight), None if bias is None else _by_head(core, bias)
    if module.temperature is not None:
        scale = module.temperature.float()[:, None].repeat(1, module.head_dim).flatten()  # (rows,)
        weight, bias = weight * scale[:, None], None if bias is None else bias * scale
    stored = weight.t().contiguous() if module.transposed else weight
    return stored.to(module.weight.dtype), None if bias is None else bias.to(module.weight.dtype)


def _by_head(matrices: Tensor, rows: Tensor) -> Tensor:
    """A matrix per head, (H, hs, hs), applied to its rows of a weight or bias."""
    heads = rows.reshape(*matrices.shape[:2], -1)  # (H, hs, d_in) or (H, hs, 1)
    return (matrices @ heads).reshape(rows.shape)
