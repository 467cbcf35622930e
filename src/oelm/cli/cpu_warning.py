"""Warn before runs at scale `full` train on a CPU, where they take weeks."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from oelm.cli.output import print
from oelm.config.run_config import RunConfig
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.units import duration_text

_LONG_SECONDS = 3600.0  # a shorter run at scale full, as in a study file with a small model, needs no warning


def warn_if_slow_on_cpu(configs: Iterable[RunConfig], runs: str, device: str) -> None:
    """Print a warning with the predicted time if the first run that has not ended takes hours on the CPU.

    device: as in `--device`
    """
    full = (config for config in configs if config.scale == "full")
    config = next((c for c in full if RunFolder(run_path(runs, c)).ended() is None), None)
    if config is None:
        return
    from oelm.experiments.plan import estimate
    from oelm.training.parallel.world import choose_device  # here, because it imports torch (slow)

    if choose_device(device).type != "cpu":
        return
    seconds = estimate(config, runs, "cpu").seconds
    if seconds is not None and seconds >= _LONG_SECONDS:
        print(
            f"warning: one run of {config.id} at scale full takes about {duration_text(seconds)} on this "
            "CPU; use a machine with a GPU, or --scale mini, which takes minutes",
            file=sys.stderr,
        )
