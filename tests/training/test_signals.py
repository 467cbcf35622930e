"""Stop signals, time limits, and what SLURM means by them."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from oelm.training.signals import STOP_SIGNALS, StopRequest

CPU = torch.device("cpu")


@pytest.fixture
def hangup_not_ignored():
    """Reset SIGHUP, which is ignored if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_not_ignored")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_sets_the_reason_and_handlers_are_restored(number, monkeypatch):
    before = signal.getsignal(number)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with StopRequest() as stop:
        assert stop.reason == ""
        signal.raise_signal(number)
        assert stop.reason == number.name
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("hangup_not_ignored")
def test_a_run_under_nohup_outlives_its_session():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.reason == ""
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"OELM_TIME_LIMIT_NEAR": "-10"}, "time limit of the SLURM job (SIGTERM)"),
        ({"OELM_TIME_LIMIT_NEAR": "3600"}, "preempted, requeued or cancelled by SLURM (SIGTERM)"),
        ({"SLURM_JOB_END_TIME": "60"}, "time limit of the SLURM job (SIGTERM)"),
        ({"SLURM_JOB_END_TIME": "3600"}, "preempted, requeued or cancelled by SLURM (SIGTERM)"),
        ({"SLURM_JOB_END_TIME": "soon"}, "SIGTERM by SLURM"),
        ({}, "SIGTERM by SLURM"),
    ],
)
def test_a_slurm_time_limit_is_distinguished_from_a_preemption(monkeypatch, environment, expected):
    """Times in seconds from now."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for name in ("OELM_TIME_LIMIT_NEAR", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value if value == "soon" else str(time.time() + float(value)))
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == expected


def test_time_limit_and_second_ctrl_c():
    with StopRequest(time_limit=1e-9) as stop:
        assert "time limit" in stop.reason
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
