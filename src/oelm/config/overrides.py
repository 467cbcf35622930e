"""`--set field=value`: change any field of a `RunConfig` by its dotted name."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from oelm.config.mapping import convert, parse
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError
from oelm.methods.presets import find_method

# Fields that identify a run; the catalogue and flags of their own set them.
_IDENTITY = ("id", "study", "scale", "seed")


@functools.cache
def field_names(cls: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: type} of every field that can be set.

    >>> field_names()["optim.lr"]
    <class 'float'>
    """
    hints = typing.get_type_hints(cls)
    names: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        name, kind = f"{prefix}{f.name}", hints[f.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            names |= field_names(kind, f"{name}.")
        elif name not in _IDENTITY:
            names[name] = kind
    return names


def override(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return `config` with the dotted fields of `changes`; the value of `method` is a method's name.

    The fields of one section change together, because some are only valid together (`method.freeze` and
    `method.layers`). A new method is applied first, so that its fields can be changed in the same call.
    """
    if "method" in changes:
        config = _with_method(config, changes["method"])
    names = field_names()
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if name == "method":
            continue
        if name not in names:
            raise _unknown_field(name, names)
        section, _, leaf = name.rpartition(".")
        sections.setdefault(section, {})[leaf] = convert(names[name], value, name)
    own = sections.pop("", {})
    parts = {s: dataclasses.replace(getattr(config, s), **fields) for s, fields in sections.items()}
    return dataclasses.replace(config, **own, **parts)


def changes_from_words(words: Iterable[str]) -> dict[str, Any]:
    """Return the `changes` for `override` from `field=value` words; the last word of a field counts."""
    return dict(split_word(word) for word in words)


def split_word(word: str) -> tuple[str, Any]:
    """Return ("optim.lr", 0.001) for `optim.lr=1e-3`; the field decides the type of the value."""
    name, equals, text = word.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"--set takes field=value, not '{word}' (for example --set optim.lr=1e-3)")
    if name == "method":
        return name, text
    if name in _IDENTITY:
        raise UsageError(
            f"--set cannot change '{name}': it has its own flag, or it identifies the experiment"
        )
    names = field_names()
    if name not in names:
        raise _unknown_field(name, names)
    return name, parse(names[name], text, name)


def _with_method(config: RunConfig, name: Any) -> RunConfig:
    chosen, compare = find_method(name), config.compare
    if compare.arm == config.method.name:  # an arm named after its method keeps doing so
        compare = dataclasses.replace(compare, arm=chosen.name)
    return dataclasses.replace(config, method=chosen, compare=compare)


def _unknown_field(name: str, names: Mapping[str, Any]) -> UsageError:
    """Return an error that suggests `optim.lr` for a bare `lr`, otherwise the nearest full name."""
    same_leaf = [n for n in names if n.rpartition(".")[2] == name]
    near = same_leaf or difflib.get_close_matches(name, ["method", *names], n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return UsageError(f"unknown field '{name}'{hint} (`oelm show ID` prints every field)")
