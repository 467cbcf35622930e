"""Saving a model with its method and loading it again with what was frozen still frozen, bit for bit.

Beside the weights stands oelm.json: the method, the seed, the position in the schedule, and the hash of each
frozen tensor. A full save of a transformers model keeps that library's own files, with low-rank adapters,
cores and temperatures folded into the matrices, so plain transformers loads the same function; the unfolded
tensors are in oelm_extras.safetensors. What no plain model can hold (a convolution) is saved under a name
that transformers does not look for. A compact save leaves out the frozen random tensors, which the seed
rebuilds; the stored hashes prove it.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from oelm.errors import OelmError, UsageError
from oelm.files.atomic import atomic_open, write_json
from oelm.files.checksums import CHECKSUMS, find_damage
from oelm.files.read import read_json_object
from oelm.methods.install import install
from oelm.methods.method import Method
from oelm.methods.reading.wrappers import plain_parameters, unwrap, uses_peft
from oelm.methods.record import Record, record_of, recorded, required_record, sha256
from oelm.methods.saving.fold import folded_state, unfoldable
from oelm.methods.saving.pretrained import NATIVE_PREFIX, native_state, native_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

METADATA = "oelm.json"
WEIGHTS = "model.safetensors"
# Names by which transformers does not take a file for a whole model of its own.
COMPACT_WEIGHTS = "oelm_compact.safetensors"
NATIVE_WEIGHTS = "oelm_model.safetensors"
EXTRA_WEIGHTS = "oelm_extras.safetensors"
_FORMAT = 1
_FIELDS = {"class", "kind", "compact", "dtype", "method", "seed", "progress", "frozen_before", "tensors"}
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def save(model: nn.Module, folder: Path | str, *, compact: bool = False) -> None:
    """Write a model to which a method was applied, for `oelm.load`.

    compact: Leave out frozen random tensors and rebuild them from the seed. Smaller by their share; plain
        transformers cannot load it. The rebuilt numbers come from this machine's linear algebra: should
        another library round differently, `oelm.load` says so by hash rather than load something else.
    """
    record = required_record(model, "save")
    _refuse_peft(model)
    model, folder = unwrap(model), Path(folder)
    if changed := changed_since_frozen(model, record):
        raise OelmError(
            f"{changed} is not what it was when '{record.method.name}' froze it: something changed or "
            f"cast it (oelm.audit tells more). Save before casting to a dtype, or cast before oelm.apply"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kind = _kind(model)
    own_file = kind == "transformers" and bool(unfoldable(model))
    remove_record(folder)
    for stale_weights in folder.glob("model*.safetensors*") if compact or own_file else ():  # also in shards
        stale_weights.unlink()
    if compact:
        _save_shape(model, folder, kind)
        kept = {n: t for n, t in _native(model).items() if n not in _rebuilt(record)}
        _write_tensors(folder / COMPACT_WEIGHTS, kept)
    elif own_file:
        _save_shape(model, folder, kind)
        _write_tensors(folder / NATIVE_WEIGHTS, _native(model))
    elif kind == "transformers":
        type(model).save_pretrained(model, folder, state_dict=folded_state(model))  # type: ignore[attr-defined]
    elif kind == "oelm":
        model.save(folder)  # type: ignore[operator]
    else:
        _write_tensors(folder / WEIGHTS, _without_aliases(model.state_dict()))
    save_metadata(model, folder, compact=compact)


def remove_record(folder: Path) -> None:
    """Delete what an earlier save wrote beside the model's own weights."""
    for stale in (CHECKSUMS, METADATA, COMPACT_WEIGHTS, NATIVE_WEIGHTS, EXTRA_WEIGHTS):
        (folder / stale).unlink(missing_ok=True)


def changed_since_frozen(model: nn.Module, record: Record) -> str:
    """The name of a frozen tensor whose bytes changed, which `load` would refuse; "" if there is none."""
    for name, tensor in record.tensors.items():
        if tensor.sha256 and sha256(recorded(model, name)) != tensor.sha256:
            return name
    return ""


def _refuse_peft(model: nn.Module) -> None:
    if uses_peft(model):
        raise OelmError(
            "save: this model carries a PEFT adapter. Save two parts: model.save_pretrained(folder) writes "
            "the adapter, oelm.save(base, folder) the model under it, before get_peft_model or after "
            "base = model.unload() (merge_and_unload() instead makes one model of both). To load: "
            "PeftModel.from_pretrained(oelm.load(base folder), adapter folder)"
        )


def save_metadata(model: nn.Module, folder: Path | str, *, compact: bool = False) -> None:
    """Write oelm.json, and the extras under their own names, into a folder that already has the weights."""
    record = required_record(model, "save")
    model, folder = unwrap(model), Path(folder)
    if record.extras and not compact and not (folder / NATIVE_WEIGHTS).exists():
        extras = {name: recorded(model, name).detach() for name in record.extras}
        if _kind(model) == "transformers" and not (unfoldable(model) or _needs_config_only(folder)):
            extras |= native_tensors(model, folded_state(model))
        _write_tensors(folder / EXTRA_WEIGHTS, extras)
    about = {
        "format": _FORMAT,
        "class": f"{type(model).__module__}:{type(model).__qualname__}",
        "kind": _kind(model),
        "compact": compact,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    (folder / CHECKSUMS).unlink(missing_ok=True)  # of what the folder held before
    write_json(folder / METADATA, {**about, **record.to_dict()})


def load(folder: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The model that `oelm.save` (or a Trainer with `oelm.OELMCallback`) wrote, ready to go on training.

    model: For classes that are neither ours nor transformers': a freshly built model of the same shape, to
        which no method was applied. Code is never loaded from a folder, only weights.
    """
    folder = Path(folder)
    _refuse_damage(folder)
    about = read_metadata(folder)
    if (folder / "adapter_config.json").is_file():
        raise OelmError(
            f"{folder} holds a PEFT adapter, not the model under it: "
            f"PeftModel.from_pretrained(oelm.load(folder of the model), {str(folder)!r}). oelm.save writes "
            f"that folder, before get_peft_model or after model.unload()"
        )
    method, seed, compact = Method.from_dict(about["method"]), about["seed"], about["compact"]
    plain = unwrap(model) if model is not None else _build(folder, about)
    if record_of(plain) is not None:
        raise OelmError("load(folder, model=...) wants a plain model; this one already carries a method")
    record = install(plain, method, seed, draw=compact and method.draws)
    if compact:
        wanted = set(_native(plain)) - _rebuilt(record)
        _load_native(plain, _read_tensors(folder / COMPACT_WEIGHTS), folder, wanted)
    elif about["kind"] == "transformers" and model is None and not _needs_config_only(folder):
        _load_extras(plain, folder, record)  # the rest came with the class
    else:
        _load_full(plain, folder, record)
    restore(plain, about, folder)
    return plain


def load_weights(model: nn.Module, folder: Path | str) -> None:
    """Put the weights of a full save into a model that has its shape and method: all of them, or an error."""
    record = required_record(model, "load_weights")
    model, folder = unwrap(model), Path(folder)
    _refuse_damage(folder)
    _load_full(model, folder, record)


def _load_full(model: nn.Module, folder: Path, record: Record) -> None:
    if (folder / NATIVE_WEIGHTS).exists():
        _load_native(model, _read_tensors(folder / NATIVE_WEIGHTS), folder, set(_native(model)))
        return
    _load_state(model, native_state(_read_weights(folder)), folder, record)
    _load_extras(model, folder, record)


def _refuse_damage(folder: Path) -> None:
    """Check the files against checksums.json, which the best model of a run has."""
    if damage := find_damage(folder):
        raise OelmError(f"{folder} is damaged: {'; '.join(damage)}. Put the folder back from a copy.")


def _needs_config_only(folder: Path) -> bool:
    """Whether transformers cannot load the weights, because a plain model has no place for all of them."""
    if (folder / NATIVE_WEIGHTS).exists():
        return True
    for path in _weight_files(folder):
        with suppress(FileNotFoundError, SafetensorError), safe_open(path, "pt") as file:
            natives = [key for key in file.keys() if key.startswith(NATIVE_PREFIX)]  # noqa: SIM118
            plain = {key.removeprefix(NATIVE_PREFIX) for key in natives} & set(file.keys())
            if any(file.get_slice(key).get_shape() == [0] for key in plain):
                return True
    return False


def read_metadata(folder: Path | str) -> dict[str, Any]:
    """The contents of oelm.json, checked."""
    path = Path(folder) / METADATA
    if not Path(folder).is_dir():
        raise OelmError(f"{folder} is not a folder")
    if not path.is_file():
        raise OelmError(
            f"{folder} holds no {METADATA}: it was not written by oelm.save. Load it with the library "
            f"that wrote it, then call oelm.apply"
        )
    try:
        about = read_json_object(path)
        if about["format"] != _FORMAT:
            raise OelmError(f"{path} has format {about['format']!r}; this oelm reads format {_FORMAT}")
        if missing := _FIELDS - set(about):
            raise ValueError(f"{', '.join(sorted(missing))} missing")
        for field, makes_sense in _sense(about).items():
            if not makes_sense:
                raise ValueError(f"the field {field} makes no sense")
        Method.from_dict(about["method"])
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise OelmError(f"{path} is damaged: {error}") from None
    return about


def _sense(about: dict[str, Any]) -> dict[str, bool]:
    """Which fields hold what `save_metadata` could have written."""
    seed, progress, tensors = about["seed"], about["progress"], about["tensors"]
    texts = [*about["frozen_before"], *(value for t in tensors for value in (t["name"], t["sha256"]))]
    return {
        "class": isinstance(about["class"], str),
        "kind": about["kind"] in ("transformers", "oelm", "module"),
        "compact": isinstance(about["compact"], bool),
        "dtype": about["dtype"] in _DTYPES,
        "seed": isinstance(seed, int) and seed >= 0,
        "progress": isinstance(progress, int | float) and 0 <= progress <= 1,
        "tensors": all(isinstance(text, str) for text in texts),
    }


def restore(model: nn.Module, about: dict[str, Any], folder: Path | str) -> None:
    """Take over position, frozen state and promises from saved metadata; check each frozen tensor's hash."""
    record = required_record(model, "restore")
    saved = {entry["name"]: entry for entry in about["tensors"]}
    if set(saved) != set(record.tensors):
        odd = sorted(set(saved) ^ set(record.tensors))
        raise OelmError(
            f"{folder}: saved from another architecture; {odd[0]} (and {len(odd) - 1} more) do not match"
        )
    parameters = plain_parameters(model)
    if unknown := set(about["frozen_before"]) - set(parameters):
        raise OelmError(f"{folder}: saved from another architecture; this one has no {sorted(unknown)[0]}")
    record.progress, record.frozen_before = about["progress"], list(about["frozen_before"])
    for name, tensor in record.tensors.items():
        heads = (saved[name].get("num_heads"), saved[name].get("head_dim"))
        if heads != (tensor.num_heads, tensor.head_dim):
            raise OelmError(
                f"{folder}: {name} was saved with {heads[0]} heads of {heads[1]}, this model has "
                f"{tensor.num_heads} of {tensor.head_dim}: the same numbers mean something else in it"
            )
        parameter = parameters[name]
        tensor.sha256 = saved[name]["sha256"]
        frozen = tensor.frozen_at(record.progress)
        if frozen and sha256(parameter) != tensor.sha256:
            how = "rebuilt from the seed" if about["compact"] and tensor.rebuildable else "loaded"
            raise OelmError(
                f"{folder}: {name} as {how} is not the tensor that was saved (its hash differs)."
                + (" Save it in full on the machine that made it." if how.startswith("rebuilt") else "")
            )
        parameter.requires_grad_(not frozen)
    for name in record.frozen_before:
        if name not in record.tensors or not record.tensors[name].ever_frozen:
            parameters[name].requires_grad_(False)


def _kind(model: nn.Module) -> str:
    if type(model).__module__.startswith("transformers."):
        return "transformers"
    ours = type(model).__module__.startswith("oelm.")
    return "oelm" if ours and hasattr(model, "save") and hasattr(type(model), "from_config") else "module"


def _build(folder: Path, about: dict[str, Any]) -> nn.Module:
    """A plain model of the saved class; transformers' full saves bring their weights along."""
    cls, dtype = _saved_class(folder, about), _DTYPES[about["dtype"]]
    if about["kind"] == "oelm":
        return cls.from_config(folder).to(dtype)
    try:
        if about["compact"] or _needs_config_only(folder):
            model = cls(cls.config_class.from_pretrained(folder)).to(dtype)
            if (folder / "generation_config.json").is_file():
                model.generation_config = model.generation_config.from_pretrained(folder)
            return model.eval()  # as from_pretrained returns it
        with _quiet_transformers():
            return cls.from_pretrained(folder, use_safetensors=True)  # never a pickle
    except Exception as error:  # a dozen kinds, of transformers, safetensors, torch and huggingface_hub
        raise OelmError(f"{folder}: transformers cannot load it: {error}") from error


def _saved_class(folder: Path, about: dict[str, Any]) -> Any:
    """The class named by the metadata; only ours and transformers' are ever imported for a file's sake."""
    module, _, name = str(about["class"]).partition(":")
    if about["kind"] == "module" or module.split(".")[0] not in ("oelm", "transformers"):
        raise OelmError(
            f"{folder} holds a {name}, a class of your own: build one and call oelm.load(folder, model=...)"
        )
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise OelmError(
            f"{folder} holds a {module}.{name}, which the installed version does not have"
        ) from None
    builds = "from_config" if about["kind"] == "oelm" else "from_pretrained"
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, builds)):
        raise OelmError(f"{folder / METADATA} names {module}.{name}, which is no model class of that kind")
    return cls


def _save_shape(model: nn.Module, folder: Path, kind: str) -> None:
    """What is needed to build the model without its weights."""
    if kind == "transformers":
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        if model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    elif kind == "oelm":
        model.save(folder)  # type: ignore[operator]
        (folder / WEIGHTS).unlink()


def _native(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer once, under the names that modules hold them by."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def _load_native(model: nn.Module, tensors: dict[str, Tensor], folder: Path, wanted: set[str]) -> None:
    """Copy tensors in by the names of `_native`: exactly the wanted ones."""
    if wanted != set(tensors):
        raise _misfit(folder, wanted - set(tensors), set(tensors) - wanted)
    own = _native(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape:
                raise _misfit(folder, {name}, set())
            own[name].copy_(tensor)


def _load_extras(model: nn.Module, folder: Path, record: Record) -> None:
    if not record.extras:
        return
    extras = _read_tensors(folder / EXTRA_WEIGHTS)
    unfolded = {
        name.removeprefix(NATIVE_PREFIX): t for name, t in extras.items() if name not in record.extras
    }
    _load_native(model, {n: t for n, t in extras.items() if n in record.extras}, folder, set(record.extras))
    _, unknown = model.load_state_dict(unfolded, strict=False)
    if unknown:
        raise _misfit(folder, set(), set(unknown))


def _load_state(model: nn.Module, state: dict[str, Tensor], folder: Path, record: Record) -> None:
    own = model.state_dict()
    odd = {name for name, tensor in state.items() if name in own and own[name].shape != tensor.shape}
    if odd:
        raise _misfit(folder, odd, set())
    missing, unknown = model.load_state_dict(state, strict=False)
    # Of tied weights a file has one, by whichever name.
    loaded = {_identity(own[name]) for name in state if name in own}
    gone = {name for name in missing if name not in own or _identity(own[name]) not in loaded}
    gone -= set(record.extras)
    if gone or unknown:
        raise _misfit(folder, gone, set(unknown))


def _misfit(folder: Path, missing: set[str], unknown: set[str]) -> OelmError:
    names = f"missing or of another shape {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
    return OelmError(f"{folder}: the weights do not fit the model ({names})")


def _rebuilt(record: Record) -> set[str]:
    """The tensors that a compact save leaves to the seed."""
    return {name for name, tensor in record.tensors.items() if tensor.rebuildable}


def _without_aliases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One name per tensor: a file has no notion of tied weights, and needs none."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unique = {}
    for name, tensor in state.items():
        if tensor.numel() == 0 or _identity(tensor) not in seen:
            unique[name] = tensor
            seen.add(_identity(tensor))
    return unique


def _identity(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_open(path) as file:
        file.write(serialize(data, metadata={"format": "pt"}))


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All of a model's own tensors, in one file or in the shards that transformers makes of a large one."""
    state: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        state.update(_read_tensors(path))
    return state


def _weight_files(folder: Path) -> list[Path]:
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    return [folder / WEIGHTS] if (folder / WEIGHTS).exists() or not shards else shards


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise OelmError(f"{path} is missing: the folder is incomplete") from None
    except Exception as error:  # safetensors raises its own type for damaged files
        raise OelmError(f"{path} is damaged: {error}") from None


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers reports keys it does not know, such as our extras, as a warning; we account for them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
