"""The settings and guards of conftest.py, checked in a pytest session of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SESSION = """
import contextlib, os, subprocess, time
from pathlib import Path

import pytest
import torch

from oelm import low_precision

low_precision._PROBE = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def test_settings_of_the_user_are_gone():
    assert not {"SLURM_JOB_ID", "RANK", "COLUMNS", "OELM_RUNS"} & set(os.environ)
    assert os.environ["OELM_CACHE_DIR"] != "/users/own"


def test_fails_and_leaves_a_process_with_a_child():
    shell = subprocess.Popen("sleep 900 & echo $!; wait", shell=True, stdout=subprocess.PIPE, text=True)
    Path("child").write_text(shell.stdout.readline())
    raise ValueError("on purpose")


def test_they_are_killed():
    child = Path("/proc", Path("child").read_text().strip(), "stat")
    for _ in range(3000):
        if not child.exists() or ") Z " in child.read_text():
            return
        time.sleep(0.1)
    raise AssertionError("still there")


def test_swallows_a_bf16_matmul():
    x = torch.ones(8, 8, dtype=torch.bfloat16)
    with contextlib.suppress(Exception):
        x @ x


@pytest.mark.bf16
def test_would_die():
    os.abort()
"""


def test_a_session_cleans_its_environment_kills_leftovers_and_guards_matmuls(tmp_path):
    shutil.copy(HERE / "conftest.py", tmp_path)
    shutil.copytree(HERE / "guard", tmp_path / "guard")
    (tmp_path / "test_session.py").write_text(SESSION, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = bf16\n", encoding="utf-8")
    user = {
        "SLURM_JOB_ID": "7",
        "RANK": "1",
        "COLUMNS": "20",
        "OELM_RUNS": "/x",
        "OELM_CACHE_DIR": "/users/own",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "test_session.py"],
        cwd=tmp_path,
        env={**os.environ, **user},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    words = done.stdout
    for name, outcome in {
        "test_settings_of_the_user_are_gone": "PASSED",
        "test_fails_and_leaves_a_process_with_a_child": "FAILED",
        "test_they_are_killed": "PASSED",
        "test_swallows_a_bf16_matmul": "ERROR",
        "test_would_die": "SKIPPED",
    }.items():
        assert f"{name} {outcome}" in words, words
    assert "bf16 or fp16 matmuls on the CPU: ['aten::mm']" in words
    assert "no bf16 matmuls on this CPU: the probe was killed by SIGILL" in words
