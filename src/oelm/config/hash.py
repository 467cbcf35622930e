"""The hash of a `RunConfig`. Two runs with the same hash have the same settings, and so the same results."""

from __future__ import annotations

import hashlib
import json

from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of all fields that affect results, so not of the texts that describe the method."""
    canonical = json.dumps(
        to_mapping(config, compared_only=True), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
