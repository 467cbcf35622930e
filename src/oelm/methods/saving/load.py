"""`oelm.load`: build a saved model, load its weights, freeze the same tensors, and check their hashes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from oelm.errors import OelmError, missing_library
from oelm.files.checksums import find_damage
from oelm.methods.install import install
from oelm.methods.reading.select import Selection
from oelm.methods.reading.wrappers import plain_parameters, unwrap
from oelm.methods.record import Record, record_of, require_record, sha256
from oelm.methods.saving.fold import UNFOLDED_PREFIX, prefer_unfolded
from oelm.methods.saving.metadata import DTYPES, METADATA, Metadata, named_tensors
from oelm.methods.saving.save import (
    COMPACT_WEIGHTS,
    EXTRA_WEIGHTS,
    OELM_WEIGHTS,
    only_oelm_can_load,
    rebuildable_tensors,
    storage_key,
    weight_files,
)
from oelm.methods.saving.ties import take_ties


def load(folder: Path | str, model: nn.Module | None = None) -> nn.Module:
    """Return the model that `oelm.save()`, or a Trainer with `oelm.OELMCallback`, wrote into `folder`.

    Args:
        folder: A folder with the weights and oelm.json.
        model: A new model of the same architecture, without a method. Required if its class is defined
            neither in oelm nor in transformers, because a folder contains no code.
    """
    folder = Path(folder)
    _check_files(folder)
    metadata = Metadata.read(folder)
    if (folder / "adapter_config.json").is_file():
        raise OelmError(
            f"{folder} contains a PEFT adapter without its base model. Load both with "
            f"PeftModel.from_pretrained(oelm.load(BASE), {str(folder)!r}). To write the folder BASE, call "
            f"oelm.save before get_peft_model or after model.unload()"
        )
    plain = unwrap(model) if model is not None else _build(folder, metadata)
    if record_of(plain) is not None:
        raise OelmError("load: a method was already applied to the given model; pass a new model without one")
    _restore_dtypes(plain, metadata)
    record = install(
        plain,
        metadata.method,
        metadata.seed,
        init=metadata.compact and metadata.method.has_random_init,
        selection=Selection(tuple(metadata.where), tuple(metadata.exclude)),
    )
    _restore_dtypes(plain, metadata)  # those of the extras, and of the parts of a split tensor
    if metadata.compact:
        names = set(named_tensors(plain)) - rebuildable_tensors(record)
        tensors = take_ties(plain, record, _read_tensors(folder / COMPACT_WEIGHTS))
        _copy_tensors(plain, tensors, folder, names)
    elif metadata.kind == "transformers" and model is None and not only_oelm_can_load(folder):
        _load_extras(plain, folder, record)  # `_build()` has loaded all other weights
    else:
        _load_full(plain, folder, record)
    restore_record(plain, metadata, folder)
    return plain


def load_weights(model: nn.Module, folder: Path | str) -> None:
    """Load the weights from `folder` into a model with the same architecture and method.

    The folder must have been saved with compact=False.
    """
    record = require_record(model, "load_weights")
    model, folder = unwrap(model), Path(folder)
    _check_files(folder)
    _load_full(model, folder, record)


def restore_record(model: nn.Module, metadata: Metadata, folder: Path | str) -> None:
    """Set the model's record to the saved one: freeze the same tensors, and check their hashes.

    `metadata` is the content of oelm.json in `folder`. Raise OelmError if the model does not match it.
    """
    record = require_record(model, "load")
    saved = {tensor.name: tensor for tensor in metadata.tensors}
    if odd := sorted(set(saved) ^ set(record.tensors)):
        raise OelmError(
            f"{folder} was saved from a different architecture: {odd[0]} and {len(odd) - 1} other tensors "
            f"are only in the folder or only in the model. Pass a model with the saved architecture"
        )
    parameters = plain_parameters(model)
    if unknown := set(metadata.frozen_before) - set(parameters):
        raise OelmError(
            f"{folder} was saved from a different architecture: this model has no "
            f"{sorted(unknown)[0]}. Pass a model with the saved architecture"
        )
    record.progress, record.verified = metadata.progress, metadata.verified
    record.frozen_before = list(metadata.frozen_before)
    record.use_cache = {name: metadata.use_cache.get(name, own) for name, own in record.use_cache.items()}
    for name, tensor in record.tensors.items():
        _check_heads(folder, saved[name].num_heads, saved[name].head_dim, tensor)
        tensor.sha256 = saved[name].sha256
        tensor.freezes_at, tensor.thaws_at = saved[name].freezes_at, saved[name].thaws_at
        frozen = tensor.frozen_at(record.progress)
        if frozen and sha256(parameters[name]) != tensor.sha256:
            wanted = metadata.dtypes.get(name, metadata.dtype)
            if (dtype := parameters[name].dtype) != DTYPES[wanted]:
                raise OelmError(
                    f"{folder} was saved in {wanted}, but {name} of the given model is {dtype}; pass "
                    f"a model of the same dtype, and cast it after oelm.load"
                )
            if metadata.compact and tensor.rebuildable:
                raise OelmError(
                    f"{folder}: {name}, rebuilt from the seed, differs from the saved tensor (its hash "
                    f"differs). The folder was saved with torch {metadata.torch or 'of unknown version'}, "
                    f"this is {torch.__version__}. Call oelm.save with compact=False on the machine that "
                    f"trained the model"
                )
            raise OelmError(
                f"{folder}: the frozen tensor {name} has changed since it was saved (its hash differs). "
                f"Restore the folder from a copy"
            )
        parameters[name].requires_grad_(not frozen)
    for name in record.frozen_before:
        if name not in record.tensors or not record.tensors[name].ever_frozen:
            parameters[name].requires_grad_(False)


def _restore_dtypes(model: nn.Module, metadata: Metadata) -> None:
    """Cast each tensor to the dtype that it had in the saved model, if that has several dtypes."""
    for name, tensor in named_tensors(model).items() if metadata.dtypes else ():
        if tensor.is_floating_point():
            owner, _, own = name.rpartition(".")
            dtype = DTYPES[metadata.dtypes.get(name, metadata.dtype)]
            getattr(model.get_submodule(owner), own).data = tensor.to(dtype)


def _check_heads(folder: Path | str, num_heads: int, head_dim: int, tensor: Any) -> None:
    if (num_heads, head_dim) != (tensor.num_heads, tensor.head_dim):
        raise OelmError(
            f"{folder}: {tensor.name} was saved with {num_heads} heads of size {head_dim}, but this model "
            f"has {tensor.num_heads} heads of size {tensor.head_dim}. Pass a model with the saved shape"
        )


def _check_files(folder: Path) -> None:
    """Raise OelmError if the folder has a checksums.json that does not match its files."""
    if folder.is_dir() and (damage := find_damage(folder)):
        raise OelmError(f"{folder} is damaged: {'; '.join(damage.values())}. Restore it from a copy.")


def _build(folder: Path, metadata: Metadata) -> nn.Module:
    """Return a plain model of the saved class.

    If plain transformers can load the folder, the model has the saved weights; otherwise random ones.
    """
    cls, dtype = _model_class(folder, metadata), DTYPES[metadata.dtype]
    if metadata.kind == "oelm":
        return cls.from_config(folder).to(dtype)
    from oelm.methods.saving.auto import read_config  # here, because it needs transformers

    try:
        config = read_config(cls.config_class, folder)
        if metadata.compact or only_oelm_can_load(folder):
            model = _cast_saved_tensors(cls(config), dtype)
            if (folder / "generation_config.json").is_file():
                model.generation_config = model.generation_config.from_pretrained(folder)
            return model.eval()  # as from_pretrained does
        with quiet_transformers():
            for setting in metadata.settings:
                setattr(config, setting, False)
            # Only safetensors, because loading a pickle can run code.
            model, found = cls.from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except Exception as error:  # transformers and safetensors raise many types of error
        raise OelmError(f"{folder}: transformers cannot load the model: {error}") from error
    # transformers leaves missing tensors random and ignores unknown ones. Some unknown ones are oelm's own:
    # extras, unfolded tensors, and biases that a setting turns on (see `plain.py`).
    own = (UNFOLDED_PREFIX, *metadata.extras)
    unknown = {name for name in found["unexpected_keys"] if not name.startswith(own)}
    if metadata.settings:
        unknown = {name for name in unknown if not name.endswith(".bias")}
    missing = set(found["missing_keys"])
    if missing or unknown:
        raise _mismatch(folder, missing, unknown)
    return model


def _cast_saved_tensors(model: Any, dtype: torch.dtype) -> Any:
    """Convert parameters and saved buffers to `dtype`; other buffers, such as rotary frequencies, stay."""
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def _model_class(folder: Path, metadata: Metadata) -> Any:
    """Return the model class that the metadata names; for safety, only classes of oelm and transformers."""
    module, _, name = metadata.model_class.partition(":")
    if metadata.kind == "module" or module.split(".")[0] not in ("oelm", "transformers"):
        raise OelmError(
            f"{folder} contains a model of the custom class {name}, which oelm cannot construct. Create an "
            f"instance and call oelm.load(folder, model=instance)"
        )
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        needs = f"loading {folder}"
        if isinstance(error, ModuleNotFoundError) and (missing := missing_library(error, needs)):
            raise missing from None
        raise OelmError(
            f"{folder} contains a {module}.{name}, but the installed version of the library has no such "
            f"class. Install the version with which the model was saved"
        ) from None
    constructor = "from_config" if metadata.kind == "oelm" else "from_pretrained"
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, constructor)):
        raise OelmError(
            f"{folder / METADATA} names {module}.{name}, which is not a model class that oelm can load. "
            f"Create an instance of your class and call oelm.load(folder, model=instance)"
        )
    return cls


def _load_full(model: nn.Module, folder: Path, record: Record) -> None:
    if (folder / OELM_WEIGHTS).exists():
        _copy_tensors(model, _read_tensors(folder / OELM_WEIGHTS), folder, set(named_tensors(model)))
        return
    state: dict[str, Tensor] = {}
    for path in weight_files(folder):
        state.update(_read_tensors(path))
    if (folder / METADATA).is_file() and Metadata.read(folder).settings:
        # Leave out biases that the saved plain model has, but this model does not have (see `plain.py`).
        own = model.state_dict()
        state = {name: t for name, t in state.items() if name in own or not name.endswith(".bias")}
    _load_state(model, prefer_unfolded(state), folder, record)
    _load_extras(model, folder, record)


def _load_extras(model: nn.Module, folder: Path, record: Record) -> None:
    """Load the parameters that the method added, and the values that other tensors had before folding."""
    if not record.extras:
        return
    tensors = _read_tensors(folder / EXTRA_WEIGHTS)
    extras = {name: t for name, t in tensors.items() if name in record.extras}
    unfolded = {n.removeprefix(UNFOLDED_PREFIX): t for n, t in tensors.items() if n not in extras}
    _copy_tensors(model, extras, folder, set(record.extras))
    _, unknown = model.load_state_dict(unfolded, strict=False)
    if unknown:
        raise _mismatch(folder, set(), set(unknown))


def _load_state(model: nn.Module, state: dict[str, Tensor], folder: Path, record: Record) -> None:
    own = model.state_dict()
    reshaped = {name for name, tensor in state.items() if name in own and own[name].shape != tensor.shape}
    if reshaped:
        raise _mismatch(folder, reshaped, set())
    missing, unknown = model.load_state_dict(state, strict=False)
    # A file contains tied weights only under one of their names; the other names are not an error.
    loaded = {storage_key(own[name]) for name in state if name in own}
    not_loaded = {name for name in missing if name not in own or storage_key(own[name]) not in loaded}
    not_loaded -= set(record.extras)
    if not_loaded or unknown:
        raise _mismatch(folder, not_loaded, set(unknown))


def _copy_tensors(model: nn.Module, tensors: dict[str, Tensor], folder: Path, expected: set[str]) -> None:
    """Copy `tensors` into the model by name. Raise OelmError unless their names are those in `expected`."""
    if expected != set(tensors):
        raise _mismatch(folder, expected - set(tensors), set(tensors) - expected)
    own = named_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape:
                raise _mismatch(folder, {name}, set())
            own[name].copy_(tensor)


def _mismatch(folder: Path, missing: set[str], unknown: set[str]) -> OelmError:
    return OelmError(
        f"{folder}: the saved weights do not match the model (missing or with a different shape: "
        f"{sorted(missing)[:3]}, unknown: {sorted(unknown)[:3]}). If a part of the model was replaced or "
        f"wrapped before saving, change a new model in the same way and pass it to oelm.load as model="
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise OelmError(f"{path} is missing, so the folder is incomplete; copy or save it again") from None
    except Exception as error:  # safetensors raises several types for damaged files
        raise OelmError(f"{path} is damaged ({error}); restore it from a copy") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' warnings about missing and unknown weights; the caller checks them itself."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
