"""The hash of a `RunConfig`: two runs with the same hash must produce the same numbers."""

from __future__ import annotations

import hashlib
import json

from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of every field that affects the numbers; the method's descriptions are left out."""
    canonical = json.dumps(
        to_mapping(config, compared_only=True), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
