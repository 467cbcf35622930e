"""`oelm.save_peft_adapter`: write the low-rank adapters of a method in PEFT's format, as a LoRA adapter.

PEFT need not be installed for this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.files.atomic import write_json
from oelm.methods.extras.extended import ExtendedProjection
from oelm.methods.extras.split import SplitProjection
from oelm.methods.reading.wrappers import unwrap
from oelm.methods.record import require_record
from oelm.methods.saving.fold import added_parameters
from oelm.methods.saving.save import write_tensors

_LOWRANK = ("lowrank_a", "lowrank_b")


def save_peft_adapter(model: nn.Module, folder: Path | str) -> None:
    """Write the low-rank adapters that a method added as a LoRA adapter that PEFT can load.

    Load it together with the plain model that `oelm.remove(model, fold=False)` returns:

        oelm.save_peft_adapter(model, "adapter")
        oelm.remove(model, fold=False).save_pretrained("base")
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter")

    Raise OelmError if the method adds other extras, which LoRA cannot represent, or if the adapters act on
    parts of a fused matrix, which are not separate modules in the plain model.
    """
    record = require_record(model, "save_peft_adapter")
    model, folder = unwrap(model), Path(folder)
    added = added_parameters(model)
    if other := [name for name in added if name.rpartition(".")[2] not in _LOWRANK]:
        raise OelmError(f"save_peft_adapter: a LoRA adapter cannot contain {other[0]}; use oelm.save instead")
    adapters = {n: m for n, m in model.named_modules() if isinstance(m, ExtendedProjection)}
    adapters = {name: module for name, module in adapters.items() if module.lowrank_a is not None}
    if not adapters:
        raise OelmError(
            f"save_peft_adapter: '{record.method.name}' adds no low-rank adapter; use oelm.save instead"
        )
    for name in adapters:
        around = name.rpartition(".")[0]
        if isinstance(model.get_submodule(around), SplitProjection):
            raise OelmError(
                f"save_peft_adapter: {name} is a part of the fused matrix {around}, so the plain model has "
                f"no module for its adapter. Call oelm.remove(model) instead: it folds the adapters into the "
                f"matrix"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "adapter_model.safetensors", _lora_tensors(adapters))
    write_json(folder / "adapter_config.json", _lora_config(adapters))


def _lora_tensors(adapters: dict[str, ExtendedProjection]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, module in adapters.items():
        assert module.lowrank_a is not None
        assert module.lowrank_b is not None
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.lowrank_a
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.lowrank_b
    return tensors


def _lora_config(adapters: dict[str, ExtendedProjection]) -> dict[str, Any]:
    """Return the fields of peft.LoraConfig. LoRA scales by alpha / rank, so alpha is lowrank_scale * rank."""
    ranks = {name: len(m.lowrank_a) for name, m in adapters.items() if m.lowrank_a is not None}
    first = next(iter(adapters))
    return {
        "peft_type": "LORA",
        "r": ranks[first],
        "lora_alpha": adapters[first].lowrank_scale * ranks[first],
        "rank_pattern": ranks,
        "alpha_pattern": {name: m.lowrank_scale * ranks[name] for name, m in adapters.items()},
        "target_modules": list(adapters),
        "fan_in_fan_out": adapters[first].transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
