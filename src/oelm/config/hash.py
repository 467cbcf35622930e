"""The hash of a `RunConfig`. Two runs with the same hash have the same settings, and so the same results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig, TuneConfig


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of all fields that affect results, so not of the texts that describe the method.

    A tuning trial does not depend on the grid that it belongs to, so a grid can grow and keep its trials.
    """
    if config.tune.trial:
        config = replace(config, tune=TuneConfig(trial=True))
    canonical = json.dumps(
        to_mapping(config, compared_only=True), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
