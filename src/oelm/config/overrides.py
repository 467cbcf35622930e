"""Change fields of a `RunConfig` by their dotted names, as `--set optim.lr=1e-3` does."""

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

# Fields that identify a run. `--set` cannot change them; the options --as, --scale and --seed can.
_IDENTITY = ("id", "study", "scale", "seed")


@functools.cache
def field_names(cls: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: type} of every config field that `--set` can change.

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
    """Return a copy of `config` with `changes`, {dotted field name: new value}.

    The key `method` takes the name of a method. It is applied first, so that `changes` can also contain
    single fields of the new method, such as `method.layers`. All changes of one section are applied at once,
    because some fields (`method.freeze` and `method.layers`) are only valid together.
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
    """Return {field: value} of the `field=value` words after --set; two values for a field are an error."""
    changes: dict[str, Any] = {}
    for name, value in map(split_word, words):
        if repr(changes.setdefault(name, value)) != repr(value):  # not the values: nan differs from itself
            raise UsageError(f"--set gives '{name}' two values, {changes[name]} and {value}; leave one out")
    return changes


def split_word(word: str) -> tuple[str, Any]:
    """Return the field and the typed value of a --set argument: ("optim.lr", 0.001) for "optim.lr=1e-3"."""
    name, equals, text = word.partition("=")
    name = name.strip()
    if not equals:
        raise UsageError(f"--set '{word}': '=' is missing. Write field=value, such as --set optim.lr=1e-3")
    if name == "method":
        return name, text
    if name in _IDENTITY:
        raise UsageError(
            f"--set cannot change '{name}', because it identifies the run: give a different experiment ID, "
            "or use --as (study), --scale, or --seed / --seeds"
        )
    if name.startswith(("tune.", "compare.")):
        raise UsageError(
            f"--set cannot change '{name}', because it records how a run was tuned and compared: use --tune, "
            "--grid and --trial-seeds for tuning, and --max-seeds of `oelm decide` for the number of seeds"
        )
    names = field_names()
    if name not in names:
        raise _unknown_field(name, names)
    return name, parse(names[name], text, name)


def _with_method(config: RunConfig, name: Any) -> RunConfig:
    chosen, old, compare = find_method(name), config.method, config.compare
    if f"{compare.arm}-".startswith(f"{old.name}-"):  # the arm was named after the old method: rename it
        compare = dataclasses.replace(compare, arm=chosen.name + compare.arm.removeprefix(old.name))
    if chosen.control != old.control:  # the control experiment has the architecture of the old method
        compare = dataclasses.replace(compare, control="")
    return dataclasses.replace(config, method=chosen, compare=compare)


def _unknown_field(name: str, names: Mapping[str, Any]) -> UsageError:
    """Return the error for an unknown field. It suggests `optim.lr` for `lr`, or the nearest full name."""
    same_leaf = [n for n in names if n.rpartition(".")[2] == name]
    near = same_leaf or difflib.get_close_matches(name, ["method", *names], n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return UsageError(f"unknown field '{name}'{hint} (`oelm show ID` prints every field)")
