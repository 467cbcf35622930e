"""The hash of a `RunConfig`. Two runs with the same hash have the same settings, and so the same results."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig, TuneConfig


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of all fields that affect results. A method's description, for example, is left out.

    The hash of a tuning trial leaves out the grid of learning rates that the trial belongs to. If the user
    adds a learning rate to the grid, the finished trials therefore keep their hash and are used again.
    """
    if config.tune.trial:
        config = replace(config, tune=TuneConfig(trial=True))
    canonical = json.dumps(
        to_mapping(config, compared_only=True), sort_keys=True, ensure_ascii=False, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
