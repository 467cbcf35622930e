"""Convert a `RunConfig` to YAML text and back. The file config.yaml of a run folder contains such a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

from oelm.config.mapping import convert, field_types, from_mapping, to_mapping
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.files.yaml import parse_yaml, read_yaml_with_lines

T = TypeVar("T")
# libyaml's dumper is five times faster than the one in Python, which is used where libyaml is missing.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def config_to_yaml(config: RunConfig) -> str:
    """Return the config as YAML text with every field, including the fields that have their default value."""
    return str(yaml.dump(to_mapping(config), Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=100))


def config_from_yaml(text: str, where: str = "config") -> RunConfig:
    """Return the config that a YAML text describes.

    An unknown field or a value of the wrong type raises a UsageError that names the field. `where` is the
    name of the file, for this message.
    """
    mapping = _from_sections(text) or parse_yaml(text, where)
    try:
        return from_mapping(RunConfig, mapping)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _from_sections(text: str) -> dict[str, Any] | None:
    """Return the mapping of a config's YAML text, parsed section by section; None if that is not possible.

    Parsed sections (`data: ...`, `method: ...`) are cached, because the runs of a study share most of them.
    If this function returns None, the caller parses the whole text at once, which also reports the error.
    """
    try:
        sections = [_section(part) for part in re.split(r"\n(?=\w)", text)]
    except UsageError:
        return None
    mapping = dict(sections)
    return mapping if len(mapping) == len(sections) else None


@lru_cache(maxsize=10_000)
def _section(text: str) -> tuple[str, Any]:
    """Return the name and the value of one top-level field, such as ("seed", 3) for "seed: 3"."""
    value = parse_yaml(text, "section")
    if not isinstance(value, dict) or len(value) != 1:
        raise UsageError("the text does not contain exactly one field")
    [(name, content)] = value.items()
    kind = field_types(RunConfig).get(name, Any)
    return name, convert(kind, content, name)


def read_yaml_as(cls: type[T], path: Path | str) -> tuple[T, dict[str, int]]:
    """Return an instance of `cls` from a YAML file of the user, and {dotted name of a key: line number}.

    Errors name the file and the line.
    """
    try:
        content, lines = read_yaml_with_lines(path)
    except OelmError as error:  # such as a file that is not text
        raise UsageError(str(error)) from None
    if content is None:
        raise UsageError(f"{path} is empty")
    with errors_with_lines(path, lines):
        return from_mapping(cls, content), lines


@contextmanager
def errors_with_lines(path: Path | str, lines: Mapping[str, int]) -> Iterator[None]:
    """Add the file, the line and the field name to the message of a UsageError raised in the `with` block."""
    try:
        yield
    except UsageError as error:
        line = _line(lines, error.field)
        key = f"{error.field}: " if error.field and error.field not in str(error) else ""
        raise UsageError(f"{path}, line {line}: {key}{error}" if line else f"{path}: {key}{error}") from None


def _line(lines: Mapping[str, int], field: str) -> int:
    """Return the line number of `field`, or of its nearest parent key that the file contains; 0 if none."""
    while field:
        if field in lines:
            return lines[field]
        field = field[: max(field.rfind("."), field.rfind("["), 0)]
    return 0
