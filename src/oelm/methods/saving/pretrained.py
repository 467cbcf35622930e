"""Replace `model.save_pretrained` of a transformers model to which a method was applied.

When transformers loads a model, it ignores tensors that the architecture does not have. So a low-rank adapter
or a convolution would be lost, and the loaded model would have different outputs. Therefore `oelm.apply()`
replaces `save_pretrained` of the model. The replacement folds extras into the plain matrices, raises an error
for extras that cannot be folded, and also writes the files that `oelm.load()` needs.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.reading.wrappers import uses_peft
from oelm.methods.record import record_of
from oelm.methods.saving.auto import wrap_config
from oelm.methods.saving.fold import (
    UNFOLDED_PREFIX,
    added_parameters,
    folded_state,
    prefer_unfolded,
    unfoldable_parameters,
    unfolded_tensors,
)
from oelm.methods.saving.plain import plain_model
from oelm.methods.saving.save import (
    WEIGHTS,
    changed_since_frozen,
    remove_files_of_earlier_save,
    save,
    save_metadata,
)

_CHECKPOINT = re.compile(r"checkpoint-\d+")  # the folder of a Trainer's checkpoint


class SavePretrained:
    """A callable that replaces `save_pretrained` of one model.

    It is an object and not a closure, because `copy.deepcopy(model)` copies an object but not a closure. So
    `save_pretrained` of the copied model saves the copied model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # OELMCallback sets this to True. Then checkpoints contain what the Trainer needs to resume.
        self.in_trainer = False

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
        if uses_peft(self.model):  # then transformers writes only the PEFT adapter
            return write(self.model, folder, state_dict=state_dict, **rest)
        if added_parameters(self.model) and not self._takes_state_dict():
            raise OelmError(
                f"save_pretrained of {type(self.model).__name__} does not take a state_dict, so it would "
                f"write parameters that its from_pretrained ignores. Use oelm.save(model, folder) and "
                f"oelm.load, or call oelm.remove(model) first"
            )
        if rest.get("push_to_hub"):
            raise OelmError(
                "save_pretrained(push_to_hub=True) would upload the folder before the files of oelm are in "
                "it: use oelm.push_to_hub(model, repo)"
            )
        if state_dict is None and not self._is_checkpoint(folder):
            plain = plain_model(self.model)
            # Without OELMCallback, the Trainer cannot resume from a checkpoint whose config turns on biases.
            if plain is None or (plain.settings and _CHECKPOINT.fullmatch(folder.name)):
                return self._save_for_oelm_only(folder)
            with _only_one_layout(folder):
                result = plain.write(self.model, folder, **rest)
            if is_main_process:
                self._write_metadata(folder, own_state=True, folded=True)
            return result
        state = self._state_to_write(state_dict)
        blocked = is_blocked(state)
        if blocked or self._is_checkpoint(folder):
            # Do not rename keys or split tensors of experts: oelm.load, and the Trainer when it resumes, load
            # them into the model as they are.
            rest["save_original_format"] = False
        with _only_one_layout(folder):
            result = write(self.model, folder, state_dict=state, **rest)
        if is_main_process:
            if blocked:
                wrap_config(folder)
            # A plain state dict, without the extras of the method, does not belong to oelm.json.
            added = set(added_parameters(self.model))
            own_state = state_dict is None or (self.in_trainer and added <= set(state_dict))
            self._write_metadata(folder, own_state=own_state, folded=not blocked, given=state_dict)
        return result

    def _takes_state_dict(self) -> bool:
        """Return whether `save_pretrained` of the class, or the one that it overrides, takes a state dict."""
        functions = [vars(cls).get("save_pretrained") for cls in type(self.model).mro()]
        return any("state_dict" in inspect.signature(f).parameters for f in functions if f is not None)

    def _is_checkpoint(self, folder: Path) -> bool:
        return self.in_trainer and _CHECKPOINT.fullmatch(folder.name) is not None

    def _state_to_write(self, given: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the state dict to write: `given`, after checks, or else that of a Trainer's checkpoint."""
        added = added_parameters(self.model)
        if given is not None:
            if not set(added) & set(given):
                return given
            if not self.in_trainer:
                raise OelmError(
                    f"the state_dict contains {sorted(set(added) & set(given))[0]}, which a plain "
                    f"{type(self.model).__name__} does not have and would ignore on loading. Leave "
                    f"state_dict out, or pass state_dict=oelm.folded_state(model)"
                )
            if missing := sorted(set(added) - set(given)):
                raise OelmError(
                    f"the state_dict lacks {missing[0]}, which the method added; pass the whole state dict "
                    f"of the model, or leave state_dict out"
                )
            return block_plain_loading(given, added)
        if unfoldable_parameters(self.model):
            return block_plain_loading(self.model.state_dict(), added)
        # The Trainer resumes by loading only this file, so the file needs the unfolded tensors, too.
        folded = folded_state(self.model)
        return folded | unfolded_tensors(self.model, folded)

    def _save_for_oelm_only(self, folder: Path) -> None:
        if not self.in_trainer or record_of(self.model) is None:
            raise OelmError(
                f"save_pretrained: a plain {type(self.model).__name__} does not have "
                f"{', '.join(unfoldable_parameters(self.model)[:3])}, so transformers would ignore these "
                f"parameters on loading. Use oelm.save(model, folder) and oelm.load(folder), or "
                f"transformers' auto classes after `import oelm`; in the Trainer, pass "
                f"callbacks=[oelm.OELMCallback()]"
            )
        save(self.model, folder)

    def _write_metadata(
        self, folder: Path, *, own_state: bool, folded: bool, given: dict[str, Tensor] | None = None
    ) -> None:
        remove_files_of_earlier_save(folder)  # they do not match the weights that were just written
        record = record_of(self.model)
        if record is None or not own_state:
            return
        if not self.in_trainer and (changed := changed_since_frozen(self.model, record)):
            warnings.warn(
                f"save_pretrained wrote the weights to {folder}, but no oelm.json, so oelm.load cannot load "
                f"the folder. The reason: the frozen tensor {changed} has changed since "
                f"'{record.method.name}' froze it (something wrote to it or cast it)",
                stacklevel=3,
            )
            return
        save_metadata(self.model, folder, folded=folded, given=given)


def replace_save_pretrained(model: nn.Module) -> None:
    """Replace `save_pretrained` of a transformers model and of all transformers models inside it.

    Also add a hook: when a state dict is loaded, its unfolded tensors replace the folded ones.
    """
    for module in model.modules():
        if type(module).__module__.startswith("oelm.") or not hasattr(type(module), "save_pretrained"):
            continue
        if "save_pretrained" not in module.__dict__:
            module.__dict__["save_pretrained"] = SavePretrained(module)
    model.register_load_state_dict_pre_hook(_load_unfolded)


@contextmanager
def _only_one_layout(folder: Path) -> Iterator[None]:
    """Delete an old model.safetensors if the block wrote shards, and an old index if it wrote one file."""
    single, index = folder / WEIGHTS, folder / f"{WEIGHTS}.index.json"
    single_before, index_before = _modified(single), _modified(index)
    yield
    if _modified(index) != index_before:
        single.unlink(missing_ok=True)
    elif _modified(single) != single_before:
        index.unlink(missing_ok=True)


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def block_plain_loading(state: dict[str, Tensor], added: list[str]) -> dict[str, Tensor]:
    """Return the state dict with one tensor moved to another key and an empty tensor in its place.

    The Trainer needs the weight file under its usual name. Plain transformers would load this file and ignore
    the parameters `added` by the method. With the empty tensor, it raises a shape error instead.
    """
    owner = next(name for name in added if name in state).rpartition(".")[0]
    while not (keys := [k for k in state if k.startswith(owner and f"{owner}.") and k not in added]):
        owner = owner.rpartition(".")[0]
    key = keys[0]
    return {**state, key: state[key].new_empty(0), UNFOLDED_PREFIX + key: state[key]}


def is_blocked(state: dict[str, Tensor]) -> bool:
    """Return whether `block_plain_loading()` returned this state dict."""
    moved = [key for key in state if key.startswith(UNFOLDED_PREFIX)]
    return any(state[key.removeprefix(UNFOLDED_PREFIX)].numel() == 0 for key in moved)


def _load_unfolded(_model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    resolved = prefer_unfolded(state, prefix)
    state.clear()
    state.update(resolved)
