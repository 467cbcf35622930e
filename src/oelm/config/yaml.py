"""A `RunConfig` as YAML text and back; config.yaml of a run folder holds this text."""

from __future__ import annotations

import yaml

from oelm.config.mapping import from_mapping, to_mapping
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError
from oelm.files.yaml import parse_yaml


def config_to_yaml(config: RunConfig) -> str:
    """Return the config as YAML, every field written out."""
    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, width=100)


def config_from_yaml(text: str, where: str = "config") -> RunConfig:
    """Parse a config. An unknown field or a value of the wrong type is an error that names its place."""
    mapping = parse_yaml(text, where)
    try:
        return from_mapping(RunConfig, mapping)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
