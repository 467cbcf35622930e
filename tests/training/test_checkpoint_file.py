"""The checkpoint file: round trip, damage, full disks."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm.files.atomic import is_disk_full
from oelm.training.checkpoints import file as checkpoint
from oelm.training.checkpoints.file import UnusableCheckpoint, load_checkpoint, load_newest, save_checkpoint

CPU = torch.device("cpu")


def some_state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {"step": seed, "weights": {"a": torch.randn(50, 7, generator=generator)}, "rng": [{"x": None}]}


def test_a_checkpoint_round_trip_keeps_the_previous_one(tmp_path):
    latest, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    for step in (1, 2, 3):
        size = save_checkpoint(some_state(step), latest, previous)
        assert size == latest.stat().st_size
    assert load_checkpoint(latest)["step"] == 3
    assert load_checkpoint(previous)["step"] == 2
    assert torch.equal(load_checkpoint(latest)["weights"]["a"], some_state(3)["weights"]["a"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.pt", "previous.pt"]
    plain = torch.load(latest, weights_only=True)  # it is also an ordinary torch file
    assert plain["step"] == 3


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> tuple[Path, Path, bytes]:
    """(latest.pt of step 2, previous.pt of step 1, the content of latest.pt)."""
    folder = tmp_path_factory.mktemp("damage")
    latest, previous = folder / "latest.pt", folder / "previous.pt"
    save_checkpoint(some_state(1), latest, previous)
    save_checkpoint(some_state(2), latest, previous)
    return latest, previous, latest.read_bytes()


@given(cut=st.integers(0, 10**6), flip=st.integers(0, 10**6), truncate=st.booleans())
def test_any_damage_is_detected(two_checkpoints, cut, flip, truncate):
    latest, previous, intact = two_checkpoints
    content = bytearray(intact)
    if truncate:
        content = content[: cut % len(content)]
    else:
        content[flip % len(content)] ^= 1 << (cut % 8)
    latest.write_bytes(content)
    with pytest.raises(UnusableCheckpoint):
        load_checkpoint(latest)
    found = load_newest(latest, previous)
    assert found.state["step"] == 1
    assert [problem.path for problem in found.rejected] == [latest]


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    save_checkpoint({"evil": Evil()}, tmp_path / "latest.pt", tmp_path / "previous.pt")
    with pytest.raises(UnusableCheckpoint, match="cannot be read"):
        load_checkpoint(tmp_path / "latest.pt")


def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path, monkeypatch):
    latest, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    save_checkpoint(some_state(1), latest, previous)

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint._HashingWriter, "_write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_checkpoint(some_state(2), latest, previous)
    assert is_disk_full(caught.value)
    assert load_checkpoint(latest)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["latest.pt"]  # no half-written file stays behind


@given(parts=st.lists(st.binary(min_size=0, max_size=9), max_size=20))
def test_the_checksum_covers_the_bytes_for_any_sizes_of_writes(parts):
    file = io.BytesIO()
    writer = checkpoint._HashingWriter(file)
    for part in [*parts, b"end\0\0"]:
        writer.write(part)
    writer.finish()
    written = b"".join(parts) + b"end"
    assert file.getvalue()[: len(written)] == written
