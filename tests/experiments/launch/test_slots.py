from __future__ import annotations

import sys

import pytest

from oelm.errors import UsageError
from oelm.experiments.launch import slots as slots_module
from oelm.experiments.launch.slots import make_slots
from oelm.experiments.launch.warm import can_fork


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "usable_cores", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(slots_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(slots_module, "cuda_count", lambda: 8)


def test_one_run_per_gpu() -> None:
    first, second = make_slots(10, gpus="2,5")
    assert (first.environment["CUDA_VISIBLE_DEVICES"], second.environment["CUDA_VISIBLE_DEVICES"]) == (
        "2",
        "5",
    )
    assert first.threads == 4
    assert first.environment["OMP_WAIT_POLICY"] == "passive"


def test_gpus_that_do_not_fill_a_group_stay_unused() -> None:
    made = make_slots(10, gpus="0,1,2,3,4", gpus_per_run=2)
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in made] == ["0,1", "2,3"]
    assert {(s.processes, s.threads) for s in made} == {(2, 2)}  # 8 cores for two runs of two processes


@pytest.mark.parametrize(
    ("runs", "slots", "expected"), [(1, 0, (1, 8)), (9, 0, (2, 4)), (9, 4, (4, 2)), (3, 16, (3, 2))]
)
def test_cpu_slots_divide_the_threads(runs: int, slots: int, expected: tuple[int, int]) -> None:
    made = make_slots(runs, slots=slots)
    assert (len(made), made[0].threads) == expected
    assert made[0].environment["OMP_NUM_THREADS"] == str(made[0].threads)


def test_without_gpus_the_workers_do_not_see_any() -> None:
    (slot,) = make_slots(1, gpus="none")
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert can_fork(slot) == (sys.platform == "linux")
    assert not can_fork(make_slots(1, gpus="0")[0])


def test_visible_gpus_are_used_automatically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    assert [s.name for s in make_slots(5)] == ["gpu 3", "gpu 4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert make_slots(5)[0].name == "cpu 0"


def test_gpus_that_torch_cannot_use_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the user names is then an error; a run must not train on the CPU in a slot "gpu 0"."""
    monkeypatch.setattr(slots_module, "cuda_count", lambda: 0)
    with pytest.raises(UsageError, match="torch finds no CUDA device"):
        make_slots(3, gpus="0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert {slot.name for slot in make_slots(3)} == {"cpu 0", "cpu 1"}
    monkeypatch.setattr(slots_module, "cuda_count", lambda: 2)
    with pytest.raises(UsageError, match="no GPU 7; available are 0, 1"):
        make_slots(3, gpus="1,7")


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": "0,0"},
        {"gpus": ","},
        {"gpus": "0", "gpus_per_run": 2},
        {"gpus_per_run": 2},
        {"slots": -1},
        {"gpus": "0", "slots": 4},
    ],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        make_slots(3, **options)  # type: ignore[arg-type]
