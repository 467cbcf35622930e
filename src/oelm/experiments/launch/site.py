"""The site profile: a YAML file with the SLURM options of a cluster, so that a lab writes them only once.

The profile is the file in the environment variable OELM_SITE, or ./oelm-site.yaml, or
~/.config/oelm/site.yaml; only the first that exists is read. Command-line flags override its values, except
that `--setup` lines are added after those of the profile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from oelm.config.yaml import read_yaml_as
from oelm.errors import UsageError

SITE = "OELM_SITE"  # environment variable with the path of the site profile
HERE = "oelm-site.yaml"


@dataclass(frozen=True)
class Site:
    """The keys of a site profile; each means the same as the flag of `oelm run` with the same name."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    constraint: str | None = None
    time: str | None = None  # such as 8h
    cpus: int | None = None
    memory: float | None = None
    parallel: int | None = None
    setup: tuple[str, ...] = ()
    # Other sbatch options, name -> value; true for a flag without a value.
    sbatch: dict[str, str | int | bool] = field(default_factory=dict)


def site_file() -> Path | None:
    """Return the path of the site profile to read; None if there is none."""
    named = os.environ.get(SITE, "")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UsageError(
                f"the site profile {named} does not exist; correct the environment variable {SITE}"
            )
        return path
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return next((path for path in (Path(HERE), home / "oelm" / "site.yaml") if path.is_file()), None)


def load_site(path: Path | None) -> Site:
    """Return the content of the site profile `path`; for None, return a profile without values."""
    return read_yaml_as(Site, path)[0] if path else Site()
