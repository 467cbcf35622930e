"""Which floating-point format a run uses on which device."""

from __future__ import annotations

import pytest
import torch

from oelm import low_precision
from oelm.errors import UsageError
from oelm.low_precision import Probe
from oelm.training import precision

CPU = torch.device("cpu")


def test_cpu_precision_has_a_reason_and_unsupported_formats_are_errors(monkeypatch):
    chosen = precision.choose_precision("auto", CPU)
    assert (chosen.dtype, chosen.reason) == ("fp32", "the default on cpu")
    with pytest.raises(UsageError, match="fp16 needs a CUDA device"):
        precision.choose_precision("fp16", CPU)
    monkeypatch.setattr(
        low_precision, "probe_cpu_matmul", lambda _dtype: Probe(False, "was killed by SIGILL")
    )
    with pytest.raises(
        UsageError, match=r"precision bf16 does not work on this CPU.*SIGILL. Use fp32 or auto"
    ):
        precision.choose_precision("bf16", CPU)
    monkeypatch.setattr(low_precision, "probe_cpu_matmul", lambda _dtype: Probe(True, "passed"))
    assert precision.choose_precision("bf16", CPU).dtype == "bf16"


@pytest.mark.parametrize(
    ("native_bf16", "capability", "chosen", "word"),
    [
        (True, (8, 0), "bf16", "has bf16 matmuls"),
        (False, (7, 5), "fp16", "fp16 tensor cores but no bf16"),
        (False, (6, 1), "fp32", "neither"),
    ],
)
def test_cuda_precision_follows_the_card(monkeypatch, native_bf16, capability, chosen, word):
    """Tests the choice without a GPU: torch.cuda reports a simulated card."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cuda = torch.device("cuda")
    found = precision.choose_precision("auto", cuda)
    assert found.dtype == chosen
    assert word in found.reason
    assert precision.choose_precision("fp32", cuda).reason == "requested"
    if not native_bf16:
        with pytest.raises(UsageError, match="precision bf16 is not supported"):
            precision.choose_precision("bf16", cuda)
