"""Fixtures and environment of all tests.

Every test sees the same machine: one thread per process, no hub, no GPU, none of the user's settings.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

FOR_TESTS = ("OELM_GOLDEN", "OELM_SHARED", "OELM_SCREENSHOTS")  # settings of the tests, which are kept
# Environment variables that are removed: settings of the user, of the terminal, and of a SLURM job or
# torchrun in which the tests may run. FOREIGN has the first letters of names, FOREIGN_NAMES has whole names.
FOREIGN = (
    "OELM_",
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SUBMITIT_",
    "HF_",
    "TRANSFORMERS_",
    "TORCHELASTIC_",
    "WANDB_",
)
FOREIGN_NAMES = {
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"),
    *("PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONHASHSEED", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"),
}
for name in list(os.environ):
    if name in FOREIGN_NAMES or (name.startswith(FOREIGN) and name not in FOR_TESTS):
        del os.environ[name]


def folder_in_memory() -> str | None:
    """Return a folder whose files are in memory, with room for those of all tests; None if there is none.

    The tests write and remove tens of thousands of small files, which takes minutes on some disks.
    """
    place = "/dev/shm"
    if not os.access(place, os.W_OK) or psutil.virtual_memory().available < 8 * 2**30:
        return None
    runs_programs = not os.statvfs(place).f_flag & os.ST_NOEXEC  # tests write programs, such as an `sbatch`
    return place if runs_programs and shutil.disk_usage(place).free > 4 * 2**30 else None


# Replaces the user's caches, which may be full or read-only.
PRIVATE = tempfile.mkdtemp(prefix="oelm-tests-", dir=folder_in_memory())
atexit.register(shutil.rmtree, PRIVATE, ignore_errors=True)
os.environ |= {
    "OMP_NUM_THREADS": "1",  # tests run in several processes, whose threads would slow each other down
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(Path(PRIVATE) / "huggingface"),
    "OELM_CACHE_DIR": str(Path(PRIVATE) / "oelm"),
    "CUDA_VISIBLE_DEVICES": "-1",
    "PYTEST_DEBUG_TEMPROOT": PRIVATE,  # pytest makes the folders of the fixture `tmp_path` there
}
os.umask(0o022)
# Hypothesis must not fail a test because a busy machine is slow.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

GUARD = str(Path(__file__).parent / "guard")  # sitecustomize.py there guards the processes that tests start
sys.path.append(GUARD)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [GUARD, os.environ.get("PYTHONPATH")]))

import low_precision_guard  # noqa: E402

low_precision_guard.install_with_torch()


# Files with few but long tests. The workers of pytest-xdist take the files in this order and then all others,
# so that no worker is left with a long file at the end.
LONG_FILES = (
    "torture/test_short.py",
    "launch/test_slurm.py",
    "launch/test_two_processes.py",
    "experiments/test_study.py",
    "launch/test_launch.py",
    "launch/test_warm.py",
    "training/test_distributed.py",
    "report/test_board_browser.py",
    "tests/test_wheel.py",
    "training/test_fit.py",
    "experiments/test_study_file.py",
    "methods/test_callback.py",
    "report/test_browser.py",
    "cli/test_runs.py",
)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # otherwise each garbage collection looks at all imported modules, which takes 0.3 s


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have the most tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        rank = {name: number for number, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(rank)))


@pytest.fixture(autouse=True)
def no_low_precision_matmul(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that runs a bf16 or fp16 matmul on the CPU.

    A test marked with @pytest.mark.bf16 may run them; it is skipped on CPUs that do not support them.
    """
    if request.node.get_closest_marker("bf16"):
        from oelm.low_precision import probe_cpu_matmul

        with low_precision_guard.allowed():
            probe = probe_cpu_matmul("bf16")
            if not probe.passed:
                pytest.skip(f"no bf16 matmuls on this CPU: the probe {probe.detail}")
            yield
        return
    yield
    found, low_precision_guard.violations[:] = list(low_precision_guard.violations), []
    assert not found, f"bf16 or fp16 matmuls on the CPU: {found}; see tests/guard/low_precision_guard.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def end_what_a_failed_test_started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kill the processes that a failed test has started and not ended, and their children."""
    begin = time.time()
    yield
    if not request.node.stash.get(FAILED, False):
        return
    for child in psutil.Process().children():
        if child.create_time() >= begin - 1:
            for process in (*child.children(recursive=True), child):
                process.kill()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `oelm run` and `oelm demo` train in this process, one run after the other.

    A worker process would spend ten times as long on importing torch as on a run at scale `smoke`.
    """
    from oelm.cli import demo, run
    from oelm.experiments.launch.jobs import Job, skip_if_ended
    from oelm.experiments.launch.local import LocalLauncher
    from oelm.experiments.launch.worker import train_folder

    class InProcess(LocalLauncher):
        def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
            for job in jobs:
                if skip_if_ended(job, self.events):
                    continue
                while job.state in ("pending", "again"):
                    self._change(job, "running")
                    self._set_state_after_exit(job, train_folder(job.folder, self.machine))
            return jobs

    for command in (demo, run):
        monkeypatch.setattr(command, "LocalLauncher", InProcess)
