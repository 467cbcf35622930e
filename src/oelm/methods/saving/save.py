"""`oelm.save`: write a model with its method so that `oelm.load` restores it bit for bit.

oelm.json, beside the weights, holds the method, the seed, the position in the schedule and the hash of
each frozen tensor. A full save of a transformers model consists of that library's own files with low-rank
adapters, biases, cores and temperatures folded into the matrices, so that plain transformers loads a model
that computes the same; oelm_extras.safetensors holds the unfolded tensors. A plain model cannot hold a
convolution, or a bias if its config has no setting for biases; a model with one gets a weight file that
transformers does not look for, and a config that says so (auto.py). A compact save leaves out the frozen
random tensors: `oelm.load` rebuilds them from the seed and checks their hashes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.files.atomic import atomic_open
from oelm.files.checksums import CHECKSUMS
from oelm.methods.reading.wrappers import unwrap, uses_peft
from oelm.methods.record import Record, require_parameter, require_record, sha256
from oelm.methods.saving.fold import UNFOLDED_PREFIX, unfolded_tensors
from oelm.methods.saving.metadata import METADATA, Metadata, kind_of
from oelm.methods.saving.plain import plain_model
from oelm.methods.saving.ties import rounding_ties

WEIGHTS = "model.safetensors"
# transformers does not look for files with these names.
COMPACT_WEIGHTS = "oelm_compact.safetensors"
OELM_WEIGHTS = "oelm_model.safetensors"
EXTRA_WEIGHTS = "oelm_extras.safetensors"


def save(model: nn.Module, folder: Path | str, *, compact: bool = False) -> None:
    """Write a model to which a method was applied, for `oelm.load`.

    Args:
        compact: Leave out frozen random tensors and rebuild them from the seed when loading. The folder is
            smaller by their share, and plain transformers cannot load it. It loads on other devices and
            machines, too (ties.py), and a tensor whose hash differs is an error.
    """
    record = require_record(model, "save")
    _refuse_peft(model)
    model, folder = unwrap(model), Path(folder)
    if changed := changed_since_frozen(model, record):
        raise OelmError(
            f"{changed} has changed since '{record.method.name}' froze it: something wrote to it or cast it "
            f"(oelm.audit tells more). Save before casting to a dtype, or cast before oelm.apply"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kind = kind_of(model)
    plain = plain_model(model) if kind == "transformers" and not compact else None
    remove_files_of_earlier_save(folder)
    if compact or (kind == "transformers" and plain is None):
        for stale in folder.glob("model*.safetensors*"):  # one file, or shards and their index
            stale.unlink()
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


def save_metadata(model: nn.Module, folder: Path | str, *, compact: bool = False) -> None:
    """Write oelm.json, and a file with the unfolded tensors, into a folder that already has the weights."""
    record = require_record(model, "save")
    model, folder = unwrap(model), Path(folder)
    settings: dict[str, bool] = {}
    if record.extras and not compact and not (folder / OELM_WEIGHTS).exists():
        extras = {name: require_parameter(model, name).detach() for name in record.extras}
        readable = kind_of(model) == "transformers" and not only_oelm_can_load(folder)
        if readable and (plain := plain_model(model)) is not None:
            extras |= unfolded_tensors(model, plain.state)
            settings = plain.settings
        write_tensors(folder / EXTRA_WEIGHTS, extras)
    (folder / CHECKSUMS).unlink(missing_ok=True)  # the checksums of the earlier files
    Metadata.of(model, compact=compact, settings=settings).write(folder)


def remove_files_of_earlier_save(folder: Path) -> None:
    """Delete the files of oelm that an earlier save wrote into the folder; model.safetensors stays."""
    for stale in (CHECKSUMS, METADATA, COMPACT_WEIGHTS, OELM_WEIGHTS, EXTRA_WEIGHTS):
        (folder / stale).unlink(missing_ok=True)


def changed_since_frozen(model: nn.Module, record: Record) -> str:
    """Return the name of a tensor whose bytes changed since it was frozen; "" if there is none."""
    for name, tensor in record.tensors.items():
        if tensor.sha256 and sha256(require_parameter(model, name)) != tensor.sha256:
            return name
    return ""


def rebuildable_tensors(record: Record) -> set[str]:
    """Return the names of the tensors that a compact save leaves out."""
    return {name for name, tensor in record.tensors.items() if tensor.rebuildable}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name; split projections are not fused again."""
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def only_oelm_can_load(folder: Path) -> bool:
    """Return whether plain transformers cannot load the weights, because they hold unfoldable extras.

    Such a folder has the weight file OELM_WEIGHTS, or an empty tensor whose values are under another key.
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
    """Return the weight file, or the shards that transformers writes for a large model."""
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    return [folder / WEIGHTS] if (folder / WEIGHTS).exists() or not shards else shards


def storage_key(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return a key that is the same for two tensors that share their memory (tied weights)."""
    return tensor.data_ptr(), tuple(tensor.shape)


def _refuse_peft(model: nn.Module) -> None:
    if uses_peft(model):
        raise OelmError(
            "save: this model has a PEFT adapter. Save two parts: model.save_pretrained(folder) writes "
            "the adapter, oelm.save(base, folder) the model under it, before get_peft_model or after "
            "base = model.unload() (merge_and_unload() instead makes one model of both). To load: "
            "PeftModel.from_pretrained(oelm.load(base folder), adapter folder)"
        )


def _save_without_weights(model: nn.Module, folder: Path, kind: str) -> None:
    """Write the files from which the model can be built, but not its weights."""
    if kind == "transformers":
        model.config.architectures = [type(model).__name__]  # type: ignore[union-attr]
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        if model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        from oelm.methods.saving.auto import wrap_config  # imports transformers

        wrap_config(folder)
    elif kind == "oelm":
        model.save(folder)  # type: ignore[operator]
        (folder / WEIGHTS).unlink()


def _without_aliases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with one name per tensor, since a safetensors file cannot hold one twice."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unique = {}
    for name, tensor in state.items():
        if tensor.numel() == 0 or storage_key(tensor) not in seen:
            unique[name] = tensor
            seen.add(storage_key(tensor))
    return unique


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    data = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_open(path) as file:
        file.write(serialize(data, metadata={"format": "pt"}))
