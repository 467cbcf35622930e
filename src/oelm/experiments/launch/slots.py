"""Divide this machine into slots; one run at a time is trained in each slot.

A slot is a GPU or a group of GPUs, or on a machine without GPUs, a part of the CPU cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from oelm.cores import OPENMP_WAITING, usable_cores
from oelm.errors import UsageError
from oelm.units import counted


@dataclass(frozen=True)
class Slot:
    """The GPUs or CPU threads of this machine that one run at a time may use."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)  # environment variables for the run's processes
    threads: int = 0  # CPU threads per process
    processes: int = 1  # processes per run


def make_slots(
    runs: int, *, gpus: str = "auto", gpus_per_run: int = 1, slots: int = 0, threads: int = 0
) -> list[Slot]:
    """Return the slots of this machine.

    runs: number of runs to train; more CPU slots than runs are not made, because they would stay empty
    gpus: "auto" (all GPUs), "none" (run on the CPU), or device numbers such as "0,1"
    slots: number of slots; 0 = automatic
    threads: CPU threads per process; 0 = automatic
    """
    if slots < 0 or threads < 0 or gpus_per_run < 1:
        raise UsageError("--slots and --threads must be 0 (automatic) or more, --gpus-per-run 1 or more")
    devices = _devices(gpus)
    if devices:
        return _gpu_slots(devices, gpus_per_run, slots, threads)
    if gpus_per_run > 1:
        raise UsageError(
            f"--gpus-per-run {gpus_per_run} needs GPUs, but torch finds none, or --gpus excludes them; "
            "leave out --gpus-per-run to run on the CPU"
        )
    found = _cpu_slots(runs, slots, threads)
    if gpus == "none":  # else the workers would train on a GPU that they find
        found = [replace(s, environment={"CUDA_VISIBLE_DEVICES": "", **s.environment}) for s in found]
    return found


def _devices(gpus: str) -> list[str]:
    """Return the names of the GPUs to use, as in CUDA_VISIBLE_DEVICES.

    Raises UsageError if the user names a GPU that does not exist.
    """
    if gpus == "none":
        return []
    if gpus == "auto":
        found = _listed_gpus()
        return found[: cuda_count()] if found else []
    devices = [part.strip() for part in gpus.split(",") if part.strip()]
    valid = all(d.isdecimal() or d.startswith(("GPU-", "MIG-")) for d in devices)
    if not devices or not valid or len(set(devices)) != len(devices):
        raise UsageError(
            f"--gpus must be auto, none, or a list of device numbers such as 0,1 without repetitions, "
            f"not '{gpus}'"
        )
    _require_gpus(gpus, devices)
    return devices


def _require_gpus(gpus: str, devices: Sequence[str]) -> None:
    count = cuda_count()
    if not count:
        raise UsageError(f"--gpus {gpus}: torch finds no CUDA device; use --gpus none to run on the CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    available = _split(visible) if visible is not None else [str(i) for i in range(count)]
    missing = [d for d in devices if d not in available and (d.isdecimal() or visible is not None)]
    if missing:
        source = " (CUDA_VISIBLE_DEVICES)" if visible is not None else ""
        raise UsageError(
            f"--gpus {gpus}: there is no GPU {', '.join(missing)}; "
            f"available are {', '.join(available)}{source}"
        )


def cuda_count() -> int:
    """Return how many GPUs torch can use; 0 if torch was built without CUDA."""
    import torch  # imported here, because the import takes a second or two and is not needed without GPUs

    return torch.cuda.device_count()


def _listed_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES or, if it is not set, all GPUs; does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _split(visible)
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(i) for i, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


def _split(visible: str) -> list[str]:
    return [d.strip() for d in visible.split(",") if d.strip() and d.strip() != "-1"]


def _gpu_slots(devices: Sequence[str], per_run: int, slots: int, threads: int) -> list[Slot]:
    if len(devices) < per_run:
        raise UsageError(
            f"--gpus-per-run {per_run} is too high: the only available GPUs are {', '.join(devices)}"
        )
    groups = [devices[i : i + per_run] for i in range(0, len(devices) - per_run + 1, per_run)]
    if slots > len(groups):
        raise UsageError(
            f"--slots {slots} is too high: with --gpus-per-run {per_run}, the GPUs {', '.join(devices)} make "
            f"{counted(len(groups), 'slot')}; leave out --slots, or use more GPUs"
        )
    groups = groups[: slots or len(groups)]
    share = threads or max(1, usable_cores() // (len(groups) * per_run))
    return [
        Slot(
            name=f"gpu {'+'.join(group)}",
            environment={"CUDA_VISIBLE_DEVICES": ",".join(group), **_thread_environment(share)},
            threads=share,
            processes=per_run,
        )
        for group in groups
    ]


def _cpu_slots(runs: int, slots: int, threads: int) -> list[Slot]:
    """Return at most `runs` CPU slots; by default about one for every four cores, but at least two.

    At least two, because two small models train faster at the same time than one after the other with twice
    the threads.
    """
    count = slots or min(usable_cores(), max(2, usable_cores() // 4))
    count = max(1, min(count, runs))
    share = threads or max(1, usable_cores() // count)
    return [Slot(f"cpu {i}", _thread_environment(share), share) for i in range(count)]


def _thread_environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **OPENMP_WAITING}
