"""The options of `oelm run --on slurm`; a YAML file, the site profile, can contain their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from oelm.cli.values import PositiveCount, Seconds, seconds
from oelm.errors import UsageError
from oelm.experiments.launch.site import Site, load_site, site_file
from oelm.experiments.launch.slurm_options import SlurmOptions, parse_sbatch

MAX_DAYS = 365  # a longer time limit of a SLURM job is certainly a typing mistake


@Parameter(name="*", group=Group("SLURM (--on slurm)", sort_key=4))
@dataclass(frozen=True)
class SlurmFlags:
    """Options for submitting runs to SLURM; a flag that is not given gets its value from the site profile."""

    partition: str | None = None
    """Partition of the jobs. This and the other options can be stored in a site profile (OELM_SITE)."""
    account: str | None = None
    """Account of the jobs."""
    qos: str | None = None
    """Quality of service of the jobs."""
    gres: str | None = None
    """Resources of each node of a job, e.g. gpu:a100:1 (default: gpu:<--gpus-per-run>)."""
    constraint: str | None = None
    """Features that the nodes must have."""
    time: Seconds | None = None
    """Time limit of one job (default 24h). A run that needs longer is resumed by another job."""
    cpus: PositiveCount | None = None
    """CPU cores for each run, on each node (default 4)."""
    memory: Annotated[float | None, Parameter(validator=Number(gte=0))] = None
    """Memory for each run in GB, on each node; 0 = the cluster's default."""
    nodes: PositiveCount | None = None
    """Nodes for each run (default 1); its processes on all nodes train one model together."""
    parallel: PositiveCount | None = None
    """Runs (tasks of the job array) that train at the same time (default 64)."""
    setup: tuple[str, ...] = ()
    """Shell command that a job runs first, e.g. 'module load cuda' or '. venv/bin/activate'; repeatable."""
    sbatch: tuple[str, ...] = ()
    """Other sbatch option as name=value, or only name, e.g. mail-type=END or exclusive; repeatable."""
    no_wait: bool = False
    """Return after submitting, without waiting for the runs."""

    def given(self) -> list[str]:
        """Return the names of the SLURM flags that the user gave."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [f"--{name.replace('_', '-')}" for name in changed]

    def options(self, gpus_per_run: int) -> SlurmOptions:
        """Return the options of the SLURM jobs: the given flags; for the others, the site profile."""
        path = site_file()
        site = load_site(path)
        wanted: dict[str, Any] = {"gpus_per_run": gpus_per_run}
        for name in ("partition", "account", "qos", "gres", "constraint", "cpus", "parallel", "nodes"):
            wanted[name] = self._value(name, site)
        if self.gres is None and site.gres:
            wanted["gres"] = _site_gres(site.gres, gpus_per_run)
        wanted["memory_gb"] = self._value("memory", site)
        site_time = seconds(site.time) if site.time else None
        wanted["time_limit"] = site_time if self.time is None else self.time
        wanted["setup"] = (*site.setup, *self.setup)
        wanted["sbatch"] = {**site.sbatch, **parse_sbatch(self.sbatch)}
        try:
            options = SlurmOptions(**{name: value for name, value in wanted.items() if value is not None})
        except UsageError as error:
            raise UsageError(f"{error} (flags and site profile {path})" if path else str(error)) from None
        if options.time_limit < 60:
            raise UsageError("--time must be at least one minute: SLURM counts time limits in minutes")
        if options.time_limit > MAX_DAYS * 86400:
            raise UsageError(f"--time must be at most {MAX_DAYS} days; write, for example, 24h")
        return options

    def _value(self, name: str, site: Site) -> Any:
        flag = getattr(self, name)
        return flag if flag is not None else getattr(site, name, None)


def _site_gres(gres: str, gpus_per_run: int) -> str | None:
    """Return the `gres` of the site profile, or None for runs without a GPU (`--gpus none`).

    Raise UsageError if it has another number of GPUs than a run needs.
    """
    if not gpus_per_run:
        return None
    last = gres.rpartition(":")[2]
    if gres.startswith("gpu") and gpus_per_run > 1 and last != str(gpus_per_run):
        raise UsageError(
            f"the site profile has gres {gres}, but --gpus-per-run is {gpus_per_run}; give a matching --gres"
        )
    return gres
