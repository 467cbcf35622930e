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

# What a run is, rather than how it runs: set by the catalogue and the command's own flags.
_IDENTITY = ("id", "study", "scale", "seed")


@functools.cache
def field_names(cls: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> annotation of every field that can be set.

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
    """`config` with the dotted fields of `changes`; `method` takes a name of the registry.

    Fields of one section change together, since some only make sense together (a method's `freeze` and
    `layers`); a new method comes first, so that its own fields can be changed in the same breath.
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
    """`changes` of `override` from a command line's `field=value` words; the last of a field counts."""
    return dict(split_word(word) for word in words)


def split_word(word: str) -> tuple[str, Any]:
    """`optim.lr=1e-3` -> ("optim.lr", 0.001), typed by the field it names."""
    name, equals, text = word.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"--set takes field=value, not '{word}' (for example --set optim.lr=1e-3)")
    if name == "method":
        return name, text
    if name in _IDENTITY:
        raise UsageError(f"'{name}' is not set by --set: it has a flag of its own or names the experiment")
    names = field_names()
    if name not in names:
        raise _unknown_field(name, names)
    return name, parse(names[name], text, name)


def _with_method(config: RunConfig, wish: Any) -> RunConfig:
    chosen, compare = find_method(wish), config.compare
    if compare.arm == config.method.name:  # the arm was named after its method and still is
        compare = dataclasses.replace(compare, arm=chosen.name)
    return dataclasses.replace(config, method=chosen, compare=compare)


def _unknown_field(name: str, names: Mapping[str, Any]) -> UsageError:
    """A bare `lr` is understood as `optim.lr` in the hint; otherwise the nearest full name. All sixty names
    would drown either."""
    same_leaf = [n for n in names if n.rpartition(".")[2] == name]
    near = same_leaf or difflib.get_close_matches(name, ["method", *names], n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return UsageError(f"unknown field '{name}'{hint} (`oelm show ID` prints every field)")
