"""The allocator's settings yield to the user's own and touch nothing but this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.training.allocator import tune_allocator

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import resource
from oelm.training.allocator import tune_allocator
tune_allocator()
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
torch.ones(16 << 20)
print(faults() - before)
"""


def test_the_users_environment_goes_first(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    tune_allocator()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_huge_pages_can_be_left_out(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    tune_allocator(huge_pages=False)
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ


@pytest.mark.skipif(not PAGES.exists() or "[never]" in PAGES.read_text(), reason="no huge pages here")
def test_large_tensors_take_few_page_faults_unless_the_user_says_otherwise():
    clean = {k: v for k, v in os.environ.items() if not k.startswith("THP_")}

    def faults(**more: str) -> int:
        command = [sys.executable, "-c", FAULTS]
        done = subprocess.run(command, env=clean | more, capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 64 MB are 16,384 pages of 4 KB
    assert faults() < 8192
    if "[madvise]" in PAGES.read_text():
        assert faults(THP_MEM_ALLOC_ENABLE="0") > 16_000
