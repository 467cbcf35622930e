"""Start a real SLURM with one node in a temporary folder, for the duration of a test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")


class NoSlurm(Exception):
    """SLURM cannot be started on this machine; the message says why."""


def ensure_installed() -> None:
    """Raise NoSlurm unless SLURM is installed; on a CI machine, install the Debian packages."""
    if os.geteuid() != 0:
        raise NoSlurm("starting slurmd and munged needs root")
    if not _missing():
        return
    if os.environ.get("CI") != "true" or shutil.which("apt-get") is None:
        raise NoSlurm(
            f"not installed: {', '.join(_missing())} (Debian: slurm-wlm munge; CI=true installs them)"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "slurm-wlm", "munge"]):
        done = subprocess.run(
            ["apt-get", *words], env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        if done.returncode:
            raise NoSlurm(f"apt-get {words[0]} failed: {done.stderr.strip()[-300:]}")
    if _missing():
        raise NoSlurm(f"still missing after installation: {', '.join(_missing())}")


def _missing() -> list[str]:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and slurmd; yields the environment variables for sbatch."""
    ensure_installed()
    folder.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), "/usr/sbin", "/sbin"])
    for name in [n for n in environment if n.startswith("SLURM_") and n != "SLURM_CONF"]:
        del environment[name]
    try:
        socket_file = _start_munge(folder, environment, started)
        (folder / "slurm.conf").write_text(_configuration(folder, socket_file), encoding="utf-8")
        for name in ("slurmctld", "slurmd"):
            words = [name, "-D", "-f", str(folder / "slurm.conf")]
            log = open(folder / f"{name}.out", "wb")  # noqa: SIM115
            started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        _wait_for_idle(environment, folder)
        yield environment
    finally:
        subprocess.run(
            ["scancel", "--user=root"], env=environment, capture_output=True, timeout=120, check=False
        )
        time.sleep(0.5)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(_munge_place(), ignore_errors=True)


def _start_munge(folder: Path, environment: dict[str, str], started: list[subprocess.Popen[bytes]]) -> Path:
    """Its own key and socket: a munge that may already run on the machine is left alone."""
    place = _munge_place()
    place.mkdir(mode=0o755)
    key = place / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    names = {
        "key-file": key,
        "socket": place / "socket",
        "pid-file": place / "pid",
        "log-file": place / "log",
        "seed-file": place / "seed",
    }
    words = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in names.items())]
    log = open(folder / "munged.out", "wb")  # noqa: SIM115
    started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    _wait(lambda: (place / "socket").exists(), "munged gave no socket", folder / "munged.out")
    return place / "socket"


def _munge_place() -> Path:
    # munged insists that the folders above its socket be root's and closed to others, as /tmp is not.
    return Path("/run") / f"oelm-munge-{os.getpid()}"


def _configuration(folder: Path, munge_socket: Path) -> str:
    host = socket.gethostname().split(".")[0]
    state, spool = folder / "state", folder / "spool"
    state.mkdir()
    spool.mkdir()
    lines = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={munge_socket},cred_expire=5",  # a requeued job waits for it
        "CryptoType": "crypto/munge",
        "SlurmctldPort": _free_port(),
        "SlurmdPort": _free_port(),
        "StateSaveLocation": state,
        "SlurmdSpoolDir": spool,
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "JobRequeue": 1,
        "MinJobAge": 300,
        "KillWait": 10,
        "AccountingStorageType": "accounting_storage/none",
        "JobAcctGatherType": "jobacct_gather/none",
    }
    text = "\n".join(f"{name}={value}" for name, value in lines.items())
    cores = os.cpu_count() or 1
    node = f"NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN"
    return f"{text}\n{node}\nPartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_idle(environment: dict[str, str], folder: Path) -> None:
    def idle() -> bool:
        words = ["sinfo", "--noheader", "--format=%t"]
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout.strip() == "idle"

    _wait(idle, "the node did not become idle", folder / "slurmctld.log", folder / "slurmd.log")


def _wait(condition: object, message: str, *logs: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            tails = "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())
            raise NoSlurm(f"{message}:\n{tails}")
        time.sleep(0.2)
