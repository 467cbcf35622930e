"""The machine as every test sees it: one thread per process, no hub, none of the user's own settings."""

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

FOR_TESTS = ("OELM_GOLDEN", "OELM_SHARED", "OELM_SCREENSHOTS")
for name in [name for name in os.environ if name.startswith("OELM_") and name not in FOR_TESTS]:
    del os.environ[name]
os.environ |= {
    "OMP_NUM_THREADS": "1",  # tests run side by side, and busy threads of two processes slow each other
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
}
# A busy machine must not fail a test for being slow.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`oelm run` and `oelm demo` train here, one run after the other: a process of its own for each would
    spend ten times as long on loading torch as on a smoke run. Launchers have tests of their own."""
    from oelm.cli import demo, run
    from oelm.experiments.launch import Job, LocalLauncher
    from oelm.experiments.worker import work

    class InProcess(LocalLauncher):
        def launch(self, jobs: Sequence[Job]) -> Sequence[Job]:
            for job in jobs:
                if not self._settled(job):
                    self._change(job, "running")
                    self._judge(job, work(job.folder, self.machine))
            return jobs

    for command in (demo, run):
        monkeypatch.setattr(command, "LocalLauncher", InProcess)
