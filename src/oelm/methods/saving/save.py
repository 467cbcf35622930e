"""`oelm.save`: write a model with its method so that `oelm.load` restores it bit for bit.

oelm.json, next to the weights, contains the method, the seed, the completed fraction of the run and the hash
of each frozen tensor.

A full save of a transformers model consists of the usual files of transformers, with low-rank adapters,
biases, cores and temperatures folded into the matrices. So plain transformers loads a model with the same
outputs. oelm_extras.safetensors contains the unfolded tensors. A convolution cannot be folded, and a bias
only if the config of the model has a setting for biases. If something cannot be folded, the weights are in
oelm_model.safetensors, a file that transformers ignores, and the config says so (see `auto.py`).

checksums.json contains the hash of each weight file, so that `oelm.load` notices damage.

A compact save leaves out the frozen random tensors: `oelm.load()` rebuilds them from the seed and checks
their hashes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.files.atomic import atomic_open
from oelm.files.checksums import CHECKSUMS, write_checksums
from oelm.files.temporary import temporary_folder
from oelm.methods.reading.wrappers import unwrap, uses_peft
from oelm.methods.record import Record, require_parameter, require_record, sha256
from oelm.methods.saving.fold import UNFOLDED_PREFIX, unfolded_tensors
from oelm.methods.saving.metadata import METADATA, Metadata, kind_of, named_tensors
from oelm.methods.saving.plain import plain_model
from oelm.methods.saving.ties import rounding_ties

WEIGHTS = "model.safetensors"
_SHARDS = "model-*-of-*.safetensors"  # the files in which transformers saves a large model
_UNFINISHED = ".oelm-save-"  # start of the name of the folder in which a save is written first
# The weight files that only oelm reads; transformers does not look for these names.
COMPACT_WEIGHTS = "oelm_compact.safetensors"
OELM_WEIGHTS = "oelm_model.safetensors"
EXTRA_WEIGHTS = "oelm_extras.safetensors"


def save(model: nn.Module, folder: Path | str, *, compact: bool = False) -> None:
    """Write a model to which a method was applied into `folder`, so that `oelm.load()` can load it.

    Args:
        compact: Leave out frozen random tensors, which `oelm.load()` rebuilds from the seed. The folder is
            smaller, but plain transformers cannot load it. `oelm.load()` also works on other devices and
            machines (`ties.py` says why); it raises an error if the hash of a rebuilt tensor differs.
    """
    record = require_record(model, "save")
    _refuse_peft(model)
    model, folder = unwrap(model), Path(folder)
    if changed := changed_since_frozen(model, record):
        raise OelmError(
            f"the frozen tensor {changed} has changed since '{record.method.name}' froze it: something wrote "
            f"to it or cast it (see the report of oelm.audit). Save before casting to a dtype, or cast "
            f"before oelm.apply"
        )
    if folder.exists() and not folder.is_dir():
        raise OelmError(f"save: {folder} is not a folder; choose a different name")
    _refuse_extra_state(model, compact)
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder, _UNFINISHED) as new:
        _write(model, record, new, compact)
        _replace_earlier_save(folder, new)


def _replace_earlier_save(folder: Path, new: Path) -> None:
    """Move the files in `new` to `folder`, and delete the other files of an earlier save there."""
    written = [path.name for path in new.iterdir()]
    for name in sorted(written, key=lambda name: name in (METADATA, CHECKSUMS)):  # these two last
        os.replace(new / name, folder / name)
    own = {METADATA, CHECKSUMS, COMPACT_WEIGHTS, OELM_WEIGHTS, EXTRA_WEIGHTS}
    own |= {WEIGHTS, f"{WEIGHTS}.index.json"}.union(path.name for path in folder.glob(_SHARDS))
    for name in own.difference(written):
        (folder / name).unlink(missing_ok=True)


def _write(model: nn.Module, record: Record, folder: Path, compact: bool) -> None:
    """Write all files of a save into the empty `folder`."""
    kind = kind_of(model)
    plain = plain_model(model) if kind == "transformers" and not compact else None
    if compact or (kind == "transformers" and plain is None):
        _save_without_weights(model, folder, kind)
        left_out = rebuildable_tensors(record) if compact else set()
        kept = {n: t for n, t in named_tensors(model).items() if n not in left_out}
        if compact:
            kept |= rounding_ties(model, record)
        write_tensors(folder / (COMPACT_WEIGHTS if compact else OELM_WEIGHTS), kept)
    elif plain is not None:
        plain.write(model, folder)
    elif kind == "oelm":
        model.save(folder)  # type: ignore[operator]
    else:
        write_tensors(folder / WEIGHTS, _without_aliases(model.state_dict()))
    save_metadata(model, folder, compact=compact)
    usual = [path.name for path in weight_files(folder)]
    write_checksums(folder, [*usual, COMPACT_WEIGHTS, OELM_WEIGHTS, EXTRA_WEIGHTS])


def save_metadata(
    model: nn.Module,
    folder: Path | str,
    *,
    compact: bool = False,
    folded: bool | None = None,
    given: dict[str, Tensor] | None = None,
) -> None:
    """Write oelm.json, and a file with the unfolded tensors, into a folder that already has weight files.

    folded: Whether the weight files are those of a plain model; by default, if transformers can load them.
    given: The state dict that the weight files contain; by default, that of the model.
    """
    record = require_record(model, "save")
    model, folder = unwrap(model), Path(folder)
    settings: dict[str, bool] = {}
    if record.extras and not compact and not (folder / OELM_WEIGHTS).exists():
        own = given or {}
        extras = {n: own[n] if n in own else require_parameter(model, n).detach() for n in record.extras}
        if folded is None:
            folded = kind_of(model) == "transformers" and not only_oelm_can_load(folder)
        if folded and (plain := plain_model(model)) is not None:
            extras |= unfolded_tensors(model, plain.state)
            settings = plain.settings
        write_tensors(folder / EXTRA_WEIGHTS, extras)
    (folder / CHECKSUMS).unlink(missing_ok=True)  # checksums of an earlier save
    Metadata.of(model, compact=compact, settings=settings).write(folder)


def remove_files_of_earlier_save(folder: Path) -> None:
    """Delete the files of an earlier save that only oelm reads; model.safetensors is not one of them."""
    for stale in (CHECKSUMS, METADATA, COMPACT_WEIGHTS, OELM_WEIGHTS, EXTRA_WEIGHTS):
        (folder / stale).unlink(missing_ok=True)


def changed_since_frozen(model: nn.Module, record: Record) -> str:
    """Return the name of a frozen tensor whose values changed after it was frozen; "" if there is none."""
    for name, tensor in record.tensors.items():
        if tensor.sha256 and sha256(require_parameter(model, name)) != tensor.sha256:
            return name
    return ""


def rebuildable_tensors(record: Record) -> set[str]:
    """Return the names of the tensors that a compact save leaves out."""
    return {name for name, tensor in record.tensors.items() if tensor.rebuildable}


def only_oelm_can_load(folder: Path) -> bool:
    """Return whether plain transformers cannot load `folder`, because some extras cannot be folded.

    Such a folder contains the file OELM_WEIGHTS, or a weight file that `block_plain_loading()` changed.
    """
    if (folder / OELM_WEIGHTS).exists():
        return True
    for path in weight_files(folder):
        with suppress(FileNotFoundError, SafetensorError), safe_open(path, "pt") as file:
            keys = set(file.keys())
            moved = {key.removeprefix(UNFOLDED_PREFIX) for key in keys if key.startswith(UNFOLDED_PREFIX)}
            if any(file.get_slice(key).get_shape() == [0] for key in moved & keys):
                return True
    return False


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of the weight file, or of the shards that transformers writes for a large model."""
    shards = sorted(folder.glob(_SHARDS))
    return [folder / WEIGHTS] if (folder / WEIGHTS).exists() or not shards else shards


def storage_key(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a key that is the same for tied weights: two tensors of equal address, shape and strides."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _refuse_peft(model: nn.Module) -> None:
    if uses_peft(model):
        raise OelmError(
            "save: oelm.save cannot save a model with a PEFT adapter. Save two parts: "
            "model.save_pretrained(adapter_folder) writes the adapter; oelm.save(base, base_folder) writes "
            "the base model, before get_peft_model or after base = model.unload(). To load them: "
            "PeftModel.from_pretrained(oelm.load(base_folder), adapter_folder). "
            "Or merge both into one model with merge_and_unload()"
        )


def _refuse_extra_state(model: nn.Module, compact: bool) -> None:
    """Raise OelmError if a module has a state besides tensors, which would not be saved."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        if kind_of(model) != "module" or not isinstance(module.get_extra_state(), Tensor):
            problem = "which oelm.save cannot store: keep it in a buffer (register_buffer) instead"
        elif compact:
            problem = "which compact=True leaves out: save without compact=True"
        else:
            continue
        raise OelmError(f"save: the module '{name}' has an extra state (get_extra_state), {problem}")


def _save_without_weights(model: nn.Module, folder: Path, kind: str) -> None:
    """Write the config files from which the model can be built, but not the weights."""
    if kind == "transformers":
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        if model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        from oelm.methods.saving.auto import wrap_config  # here, because it needs transformers

        wrap_config(folder)
    elif kind == "oelm":
        model.save(folder)  # type: ignore[operator]
        (folder / WEIGHTS).unlink()


def _without_aliases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with one name per tensor: safetensors cannot store tied weights twice."""
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    unique = {}
    for name, tensor in state.items():
        if tensor.numel() == 0 or storage_key(tensor) not in seen:
            unique[name] = tensor
            seen.add(storage_key(tensor))
    return unique


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        content = serialize(data, metadata={"format": "pt"})
    except RuntimeError:  # some of the tensors overlap in memory: store a copy of each
        content = serialize(
            {name: tensor.clone() for name, tensor in data.items()}, metadata={"format": "pt"}
        )
    with atomic_open(path) as file:
        file.write(content)
