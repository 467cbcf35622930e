"""Write a `RunConfig` as YAML text and read it back; the file config.yaml of a run folder is such a text."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, get_type_hints

import yaml

from oelm.config.mapping import convert, from_mapping, to_mapping
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError
from oelm.files.yaml import parse_yaml


def config_to_yaml(config: RunConfig) -> str:
    """Return the config as YAML text with every field, also those that have their default value."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, width=100)


def config_from_yaml(text: str, where: str = "config") -> RunConfig:
    """Return the config that a YAML text describes.

    An unknown field or a value of the wrong type raises a UsageError that names the field; `where` is the
    name of the file, for the message.
    """
    mapping = _from_sections(text) or parse_yaml(text, where)
    try:
        return from_mapping(RunConfig, mapping)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _from_sections(text: str) -> dict[str, Any] | None:
    """Return the config's mapping, parsed section by section; None if that is not possible.

    The sections of a thousand runs (`data: ...`, `method: ...`) are mostly equal, so each different section
    is parsed only once. None leaves the text, and the error message, to the parser of the whole file.
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
        raise UsageError("not one field")
    [(name, content)] = value.items()
    kind = get_type_hints(RunConfig).get(name, Any)
    return name, convert(kind, content, name)
