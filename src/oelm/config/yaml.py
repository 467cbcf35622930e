"""Write a `RunConfig` as YAML text and read it back; the file config.yaml of a run folder is such a text."""

from __future__ import annotations

import yaml

from oelm.config.mapping import from_mapping, to_mapping
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
    mapping = parse_yaml(text, where)
    try:
        return from_mapping(RunConfig, mapping)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
