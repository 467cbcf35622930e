"""`oelm run --dry-run`: print the runs that would be started, and their device and data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from oelm.cli.gpu import gpu_facts, print_gpu_hours
from oelm.cli.options import MachineOptions
from oelm.cli.output import print, print_json
from oelm.config.run_config import RunConfig
from oelm.experiments.experiment import model_stand_ins
from oelm.experiments.launch.jobs import Launcher
from oelm.experiments.launch.local import LocalLauncher
from oelm.experiments.launch.slurm import SlurmLauncher
from oelm.experiments.request import ArmPlan
from oelm.experiments.study import unequal_settings
from oelm.experiments.tuning import check_run_folders
from oelm.runs.folder import RunFolder
from oelm.runs.layout import run_path
from oelm.runs.scan import state_of
from oelm.units import counted


def print_plan(
    arms: Sequence[ArmPlan],
    runs: str,
    launcher: Launcher,
    machine: MachineOptions,
    gpu: str,
    as_json: bool,
) -> None:
    """Print the runs that `oelm run` would start, their device and data, and predicted hours on `gpu`.

    Raises UsageError if `oelm run` would refuse a run, because its folder contains a different one.
    """
    # A tuning trial is shorter than a run, and counts as this part of one.
    sizes = [(arm.runs[0], len(arm.runs) + arm.total_trials * arm.experiment.trial_share) for arm in arms]
    say = (lambda _: None) if as_json else print
    trials = [trial for group in check_run_folders(arms, runs, say) for trial in group.trials()]
    configs = [*trials, *(config for arm in arms for config in arm.runs)]
    tuned = {arm.id for arm in arms if arm.grid}
    later = max(0, sum(arm.total_trials for arm in arms) - len(trials))
    plan = [_planned_run(runs, config, config.id in tuned) for config in configs]
    unequal = unequal_settings(arms)
    script = _sbatch_script(launcher, sum(row["state"] != "finished" for row in plan))
    sources, device = _data_sources(configs, machine.data_dir), _device(machine.device, launcher)
    if as_json:
        predicted = {"gpu": gpu_facts(sizes, gpu, runs)} if gpu else {}
        facts = {"runs": plan, "later_trials": later, "device": device, "data": sources}
        facts["unequal"] = [u.to_dict() for u in unequal]
        print_json({**facts, **predicted, **({"script": script} if script else {})})
        return
    print(f"device: {device}")
    for name, source in sources.items():
        print(f"data: {name} from {source}")
    for note in dict.fromkeys(note for arm in arms for note in model_stand_ins(arm.runs[0])):
        print(f"note: {note}")
    for setting in unequal:
        print(f"unequal: {setting}")
    for row in plan:
        lr = f"{row['lr']:g}" if row["lr"] else "tuned"
        state = f" ({row['state']})" if row["state"] else ""
        print(f"{'trial' if row['trial'] else 'run  '}  lr {lr:8} {row['folder']}{state}")
    if later:
        print(
            f"trial  {later} further trials: the better half of the learning rates with the other trial seeds"
        )
    states = Counter(row["state"] for row in plan if row["state"])
    found = f" ({', '.join(f'{n} {state}' for state, n in states.items())})" if states else ""
    total = counted(len(plan) + later, "run")
    if isinstance(launcher, LocalLauncher):
        names = ", ".join(slot.name for slot in launcher.slots)
        print(f"{total}{found} in {counted(len(launcher.slots), 'slot')}: {names}")
    else:
        after = "; tuned runs follow in arrays of their own, after their tuning trials" if tuned else ""
        print(f"{total}{found} as tasks of a SLURM job array{after}:\n\n{script}", end="")
    if gpu:
        print_gpu_hours(sizes, gpu, runs)


def _planned_run(root: str, config: RunConfig, tuned: bool) -> dict[str, Any]:
    folder, trial = run_path(root, config), config.tune.trial
    return {
        "id": config.id,
        "scale": config.scale,
        "seed": config.seed,
        "trial": trial,
        "lr": None if tuned and not trial else config.optim.lr,
        "state": state_of(folder)[0] if RunFolder(folder).exists() else "",
        "folder": str(folder),
    }


def _data_sources(configs: Sequence[RunConfig], data_dir: str) -> dict[str, str]:
    """Return {dataset: source of its text}; lists several sources if the configs read it from several."""
    from oelm.data.sources.open import describe_source  # imported here, because it imports numpy (slow)

    found: dict[str, list[str]] = {}
    for data in dict.fromkeys(config.data for config in configs):
        sources = found.setdefault(data.dataset, [])
        source = describe_source(data.dataset, data.source, data_dir)
        sources.extend([source] if source not in sources else [])
    return {name: " and ".join(sources) for name, sources in found.items()}


def _device(device: str, launcher: Launcher) -> str:
    """Return the name of the device that the runs will train on."""
    if not isinstance(launcher, LocalLauncher):
        return "chosen by the job on its node"
    if device != "auto":
        return device
    return "cuda" if launcher.slots[0].name.startswith("gpu") else "cpu"


def _sbatch_script(launcher: Launcher, count: int) -> str:
    """Return the script for sbatch; "" if the runs are not submitted to SLURM."""
    return launcher.script(max(1, count)) if isinstance(launcher, SlurmLauncher) else ""
