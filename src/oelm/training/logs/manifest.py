"""Collect the content of manifest.json: the command, package versions and machine of a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from oelm import compiled
from oelm.compiled import products
from oelm.runs.schema import Manifest

PACKAGES = ("oelm", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine_facts() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "compiled_attention": compiled.library() is not None,
        "compiled_products": products.available(),
    }


def base_manifest(config_hash: str, command: str = "") -> Manifest:
    """Return a manifest without the fields about the data; `command` is the command that the user typed."""
    return Manifest(
        config_hash=config_hash,
        command=_command(command),
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        versions=versions(),
        machine=machine_facts(),
        git_commit=git_commit(),
    )


def _command(typed: str) -> str:
    """Return the command that repeats the run: `typed`, or if this is "", the command of this process.

    The path of the program is shortened to its name, also that of `python -m oelm`. If OELM_DATA_DIR is set
    and the command has no option --data-dir, the result starts with `OELM_DATA_DIR=...`.
    """
    program, *rest = shlex.split(typed) or sys.argv
    data = os.environ.get("OELM_DATA_DIR", "")
    named = not data or any(word.startswith("--data-dir") for word in rest)
    path = Path(program)
    name = path.parent.name if path.name == "__main__.py" else path.name
    return ("" if named else f"OELM_DATA_DIR={shlex.quote(data)} ") + shlex.join([name, *rest])


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def git_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the git commit of oelm's source code; None if oelm does not run from a git repository.

    "-dirty" is appended if the source code, or that of the benchmarks, has changes that are not committed, or
    if git cannot tell.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = ("--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    clean = _git(folder, *changes, "--", ":/src", ":/benchmarks/*.py") == ""
    return commit if clean else f"{commit}-dirty"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what a git command prints; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
