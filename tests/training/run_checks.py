"""Helpers of the tests that interrupt or damage runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from oelm.training.state import Interrupted, Training

EQUAL_FILES = ("metrics.jsonl", "results.json", "latest.pt", "freeze_audit.json", "best/model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that the files that must not depend on interruptions are bit-identical."""
    for name in EQUAL_FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), f"{name} differs"


def stop_after(patch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt a run, as a signal would, in the first micro-batch after `step` completed steps."""

    def check_stop(training: Training) -> None:
        if training.progress.step >= step:
            raise Interrupted("test")

    patch.setattr(Training, "check_stop", check_stop)


def flip_bits(path: Path, at: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= mask
    path.write_bytes(content)
