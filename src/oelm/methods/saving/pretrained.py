"""`model.save_pretrained` of a transformers model that carries a method.

transformers saves whatever the state dict holds and drops, on loading, what the architecture does not know.
A low-rank adapter or a convolution would be lost that way, and the loaded model would compute something else.
So `oelm.apply` replaces the method on the instance: what the plain architecture can hold is folded into its
own matrices, what it cannot hold is refused, and what `oelm.load` needs is written beside the weights.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.reading.wrappers import uses_peft
from oelm.methods.record import record_of
from oelm.methods.saving.fold import added_parameters, folded_state, unfoldable

#: Keys with this prefix hold tensors as the model with its method has them, before folding. transformers
#: lists them as unexpected when it loads the file, so the name says what to do instead.
NATIVE_PREFIX = "needs_oelm_load."


class SavePretrained:
    """Stands for `save_pretrained` on one model. An object, so that copies and pickles refer to their own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.in_trainer = False  # set by OELMCallback: the Trainer must be able to save and resume

    def __call__(
        self,
        save_directory: Path | str,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **rest: Any,
    ) -> Any:
        write: Any = type(self.model).save_pretrained  # type: ignore[attr-defined]
        folder = Path(save_directory)
        if not is_main_process:
            rest["is_main_process"] = False
        if uses_peft(self.model):  # transformers then writes the adapter alone
            return write(self.model, folder, state_dict=state_dict, **rest)
        if state_dict is None and unfoldable(self.model) and not self._checkpoint(folder):
            return self._save_for_oelm_only(folder)
        state = self._state(folder, state_dict)
        if is_guarded(state):
            rest["save_original_format"] = False  # oelm.load reads these keys by itself
        result = write(self.model, folder, state_dict=state, **rest)
        if is_main_process:
            self._write_record(folder, belongs=state_dict is None or self.in_trainer)
        return result

    def _checkpoint(self, folder: Path) -> bool:
        return self.in_trainer and re.fullmatch(r"checkpoint-\d+", folder.name) is not None

    def _state(self, folder: Path, given: dict[str, Tensor] | None) -> dict[str, Tensor]:
        added = added_parameters(self.model)
        if given is not None:
            if not set(added) & set(given):
                return given
            if not self.in_trainer:
                raise OelmError(
                    f"the state_dict holds {sorted(set(added) & set(given))[0]}, which a plain "
                    f"{type(self.model).__name__} has no place for and would drop on loading: leave "
                    f"state_dict out, or pass state_dict=oelm.folded_state(model)"
                )
            return guarded(given, added)
        if unfoldable(self.model):
            return guarded(self.model.state_dict(), added)
        plain = folded_state(self.model)
        # The Trainer resumes by load_state_dict from this one file: it must hold the unfolded tensors, too.
        return plain | native_tensors(self.model, plain) if added and self._checkpoint(folder) else plain

    def _save_for_oelm_only(self, folder: Path) -> None:
        from oelm.methods.saving.save import save

        if not self.in_trainer or record_of(self.model) is None:
            raise OelmError(
                f"save_pretrained: a plain {type(self.model).__name__} has no place for "
                f"{', '.join(unfoldable(self.model)[:3])}, and transformers would drop them on loading. Use "
                f"oelm.save(model, folder) and oelm.load(folder); in the Trainer, pass "
                f"callbacks=[oelm.OELMCallback()]"
            )
        save(self.model, folder)

    def _write_record(self, folder: Path, *, belongs: bool) -> None:
        from oelm.methods.saving.save import changed_since_frozen, remove_record, save_metadata

        remove_record(folder)  # an older one would not belong to these weights
        record = record_of(self.model)
        if record is None or not belongs:
            return
        if not self.in_trainer and (changed := changed_since_frozen(self.model, record)):
            warnings.warn(
                f"{folder} holds the weights but no oelm.json, because {changed} is not what it was when "
                f"'{record.method.name}' froze it (changed or cast), so oelm.load would refuse the folder",
                stacklevel=3,
            )
            return
        save_metadata(self.model, folder)


def replace_save_pretrained(model: nn.Module) -> None:
    """Make `save_pretrained` of this model, and of models inside it, write what can be loaded again."""
    for module in model.modules():
        if type(module).__module__.startswith("oelm.") or not hasattr(type(module), "save_pretrained"):
            continue
        if "save_pretrained" not in module.__dict__:
            module.__dict__["save_pretrained"] = SavePretrained(module)
    model.register_load_state_dict_pre_hook(_take_native_tensors)


def native_tensors(model: nn.Module, plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a folded state lacks: the added parameters, and the tensors that folding changed."""
    own = model.state_dict()
    added = {name: own[name] for name in added_parameters(model)}
    changed = {NATIVE_PREFIX + n: own[n] for n, t in plain.items() if not torch.equal(t, own[n])}
    return added | changed


def guarded(state: dict[str, Tensor], added: list[str]) -> dict[str, Tensor]:
    """The state with one tensor under another name and an empty one in its place.

    The Trainer needs the file under its usual name; transformers, which would drop what a method added, then
    fails on the shape instead of loading another model.
    """
    owner = next(name for name in added if name in state).rpartition(".")[0]
    while not (keys := [k for k in state if k.startswith(owner and f"{owner}.") and k not in added]):
        owner = owner.rpartition(".")[0]
    key = keys[0]
    return {**state, key: state[key].new_empty(0), NATIVE_PREFIX + key: state[key]}


def is_guarded(state: dict[str, Tensor]) -> bool:
    natives = [key for key in state if key.startswith(NATIVE_PREFIX)]
    return any(state[key.removeprefix(NATIVE_PREFIX)].numel() == 0 for key in natives)


def native_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """A saved state with the unfolded tensors under the names the model with its method knows."""
    mark = prefix + NATIVE_PREFIX
    natives = {prefix + k.removeprefix(mark): t for k, t in state.items() if k.startswith(mark)}
    return {k: t for k, t in state.items() if not k.startswith(mark)} | natives


def _take_native_tensors(_model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    resolved = native_state(state, prefix)
    state.clear()
    state.update(resolved)
