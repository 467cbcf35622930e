"""The parts of the loop, each alone."""

from __future__ import annotations

import errno
import io
import itertools
import math
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oelm import low_precision
from oelm.config.run_config import OptimConfig
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import is_disk_full
from oelm.low_precision import Probe
from oelm.methods.apply import apply
from oelm.models.gpt import GPT, GPTConfig, gpt_config
from oelm.training import checkpoint, precision
from oelm.training.checkpoint import CorruptCheckpoint, load_checkpoint, load_newest, save_checkpoint
from oelm.training.logs.journal import Journal
from oelm.training.logs.metrics import MetricsLog, metrics_problem
from oelm.training.measure.attention import attention_statistics, off_orthogonal
from oelm.training.measure.flops import flop_model
from oelm.training.measure.memory import is_out_of_memory
from oelm.training.measure.timing import WARMUP_STEPS, Timer
from oelm.training.optimizer import build_optimizer, load_optimizer_state, optimizer_state
from oelm.training.schedule import lr_factor
from oelm.training.signals import STOP_SIGNALS, StopRequest
from oelm.units import bytes_text

CPU = torch.device("cpu")


# -- schedule -------------------------------------------------------------------------------------


@given(
    total=st.integers(1, 5000),
    warm=st.integers(0, 1000),
    kind=st.sampled_from(["cosine", "linear", "constant"]),
    end=st.floats(0, 1),
)
def test_rate_warms_up_to_one_then_never_rises(total, warm, kind, end):
    optim = OptimConfig(schedule=kind, warmup_steps=warm, final_lr_share=end)
    rates = [lr_factor(optim, step, total) for step in range(0, total, max(1, total // 50))]
    steps = list(range(0, total, max(1, total // 50)))
    assert all(0 <= rate <= 1 for rate in rates)
    after = [rate for step, rate in zip(steps, rates, strict=True) if step >= warm]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if 0 < warm < total:
        assert lr_factor(optim, warm - 1, total) == 1.0
        assert lr_factor(optim, warm, total) == 1.0


def test_rate_ends_where_it_should():
    cosine = OptimConfig(schedule="cosine", final_lr_share=0.1)
    assert lr_factor(cosine, 1000, 1000) == pytest.approx(0.1)
    share = OptimConfig(schedule="linear", warmup_share=0.1)
    assert lr_factor(share, 49, 1000) == 0.5
    assert lr_factor(share, 550, 1000) == pytest.approx(0.5)


# -- signals --------------------------------------------------------------------------------------


@pytest.fixture
def hangup_not_ignored():
    """SIGHUP as in a session, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_not_ignored")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_is_noted_and_handlers_come_back(number, monkeypatch):
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
def test_a_time_limit_of_slurm_is_told_from_a_preemption(monkeypatch, environment, expected):
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


def test_a_terminal_that_vanishes_does_not_stop_the_log(tmp_path, monkeypatch):
    """As at the end of an ssh session, while the run still has to write its checkpoint."""

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stderr", Gone())
    journal = Journal(tmp_path / "log", show=True)
    for step in range(2):
        journal.line(f"step {step}")
        journal.progress(step, 2, "")
    journal.close()
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["0", "1"]


# -- precision ------------------------------------------------------------------------------------


def test_cpu_precision_has_a_reason_and_refuses_what_it_cannot(monkeypatch):
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
    """The decision alone, with a card that only says what it is."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cuda = torch.device("cuda")
    found = precision.choose_precision("auto", cuda)
    assert found.dtype == chosen
    assert word in found.reason
    assert precision.choose_precision("fp32", cuda).reason == "asked for"
    if not native_bf16:
        with pytest.raises(UsageError, match="no bf16 matmuls"):
            precision.choose_precision("bf16", cuda)


# -- checkpoints ----------------------------------------------------------------------------------


def some_state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {"step": seed, "weights": {"a": torch.randn(50, 7, generator=generator)}, "rng": [{"x": None}]}


def test_checkpoint_round_trip_keeps_one_before(tmp_path):
    latest, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    for step in (1, 2, 3):
        size = save_checkpoint(some_state(step), latest, previous)
        assert size == latest.stat().st_size
    assert load_checkpoint(latest)["step"] == 3
    assert load_checkpoint(previous)["step"] == 2
    assert torch.equal(load_checkpoint(latest)["weights"]["a"], some_state(3)["weights"]["a"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.pt", "previous.pt"]
    plain = torch.load(latest, weights_only=True)  # an ordinary torch file all the same
    assert plain["step"] == 3


@given(cut=st.integers(0, 10**6), flip=st.integers(0, 10**6), truncate=st.booleans())
def test_any_damage_is_noticed(tmp_path_factory, cut, flip, truncate):
    folder = tmp_path_factory.mktemp("damage")
    latest, previous = folder / "latest.pt", folder / "previous.pt"
    save_checkpoint(some_state(1), latest, previous)
    save_checkpoint(some_state(2), latest, previous)
    content = bytearray(latest.read_bytes())
    if truncate:
        content = content[: cut % len(content)]
    else:
        content[flip % len(content)] ^= 1 << (cut % 8)
    latest.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(latest)
    state, words = load_newest(latest, previous)
    assert state["step"] == 1
    assert str(latest) in words[0]


def test_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    save_checkpoint({"evil": Evil()}, tmp_path / "latest.pt", tmp_path / "previous.pt")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        load_checkpoint(tmp_path / "latest.pt")


def test_full_disk_leaves_the_last_one_whole(tmp_path, monkeypatch):
    latest, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    save_checkpoint(some_state(1), latest, previous)

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint._HashingWriter, "_emit", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_checkpoint(some_state(2), latest, previous)
    assert is_disk_full(caught.value)
    assert load_checkpoint(latest)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["latest.pt"]  # no half-written file stays behind


@given(parts=st.lists(st.binary(min_size=0, max_size=9), max_size=20))
def test_checksum_covers_the_bytes_however_they_arrive(parts):
    file = io.BytesIO()
    writer = checkpoint._HashingWriter(file)
    for part in [*parts, b"end\0\0"]:
        writer.write(part)
    writer.finish()
    whole = b"".join(parts) + b"end"
    assert file.getvalue()[: len(whole)] == whole


# -- metrics --------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.rows = []

    def log(self, step, values):
        self.rows.append((step, values))

    def close(self):
        self.rows.append("closed")


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    path, tracker = tmp_path / "metrics.jsonl", Recorder()
    log = MetricsLog(path, trackers=[tracker])
    log.row(1, "train", loss=2.0)
    offset, sha256 = log.sync()
    assert metrics_problem(path, offset, sha256) == ""
    log.row(2, "train", loss=1.5, note="x")
    log.event(2, "thawed")
    log.close()
    assert tracker.rows == [(1, {"train/loss": 2.0}), (2, {"train/loss": 1.5}), "closed"]
    again = MetricsLog(path, offset=offset)
    again.row(2, "train", loss=1.25)
    again.close()
    assert path.read_text() == (
        '{"step": 1, "kind": "train", "loss": 2.0}\n{"step": 2, "kind": "train", "loss": 1.25}\n'
    )
    with pytest.raises(OelmError, match="shorter than the 1000000 bytes"):
        MetricsLog(path, offset=10**6)


def test_metrics_refuse_what_is_no_number(tmp_path):
    log = MetricsLog(tmp_path / "m")
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.row(1, "train", loss=math.nan)
    log.close()


# -- timing ---------------------------------------------------------------------------------------


def test_timing_counts_whole_steps_without_warm_up(tmp_path):
    timer = Timer(tmp_path / "steps.bin", CPU)
    for number in range(10):
        with timer.step(number) as facts:
            facts.update(tokens=100.0, flops=3e6, full_flops=4e6)
    with timer.validating():
        pass
    stats = timer.write(tmp_path / "timing.json", steps=10)
    assert stats["num_steps_measured"] == 10 - WARMUP_STEPS
    assert stats["warmup_steps"] == WARMUP_STEPS
    assert stats["num_validations"] == 1
    assert stats["predicted_saving"] == pytest.approx(0.25)
    assert stats["flops_per_step"] == 3e6
    assert stats["tokens_per_second"] == pytest.approx(100 / stats["mean_step_time"])
    order = [stats[f"{name}_step_time"] for name in ("min", "median", "p95", "p99", "max")]
    assert order == sorted(order)
    # A later process goes on: its steps replace those done again, its warm-up is its own.
    later = Timer(tmp_path / "steps.bin", CPU, stats)
    for number in range(8, 14):
        with later.step(number) as facts:
            facts.update(tokens=100.0, flops=3e6, full_flops=4e6)
    after = later.write(tmp_path / "timing.json", steps=14)
    assert after["num_steps_measured"] + after["warmup_steps"] == 14
    assert after["warmup_steps"] == 2 * WARMUP_STEPS
    assert after["total_wall_time"] > stats["total_wall_time"]
    assert after["num_validations"] == 1


def test_timing_of_nothing_says_nothing(tmp_path):
    stats = Timer(tmp_path / "none.bin", CPU).stats(0)
    assert stats["num_steps_measured"] == 0
    assert stats["mean_step_time"] is None


# -- FLOPs ----------------------------------------------------------------------------------------


def medium(**changes) -> GPT:
    return GPT(gpt_config("medium-512", **changes))


def test_flops_of_medium_512_by_hand():
    model = medium()
    cost = flop_model(model).step(rows=4, length=512)
    tokens, d, ff, layers, vocabulary = 4 * 512, 512, 2048, 6, 50257
    weights = layers * (4 * d * d + 2 * d * ff) + vocabulary * d
    assert cost.forward == 2 * tokens * weights
    assert cost.input_gradient == cost.weight_gradient == cost.forward
    assert cost.attention == 3 * layers * (4 * 4 * 512 * 512 * d) / 2
    apply(model, "oelm-freeze")
    frozen = flop_model(model)
    assert cost.total - frozen.step(4, 512).total == 2 * tokens * layers * 2 * d * d
    assert frozen.all_trained().step(4, 512).total == cost.total


def test_frozen_qk_save_at_most_four_of_seventy_two():
    """Without attention and head, a block's matmuls are 72 d^2 per token and Q/K's weight gradients 4 d^2."""
    model = medium(classes=2, vocab_size=64)
    apply(model, "oelm-freeze")
    cost = flop_model(model)
    assert cost.saving(1, 1) == pytest.approx(4 / 72, rel=0.01)
    assert cost.saving(16, 512) < 4 / 72


def test_extras_cost_what_they_multiply():
    plain, rich = medium(vocab_size=64), medium(vocab_size=64)
    apply(plain, "oelm-freeze")
    apply(rich, "oelm-lowrank")
    rank = rich._oelm.method.lowrank  # type: ignore[union-attr]
    extra = flop_model(rich).step(1, 8).total - flop_model(plain).step(1, 8).total
    gradients = 2 * 2 * 8 * (2 * rank * 512)  # two thin products for each of 8 tokens; the rest is merged
    assert extra == 6 * 2 * gradients


def test_a_residue_that_is_not_thin_costs_the_whole_weight_gradient():
    mini = [GPT(gpt_config("mini", vocab_size=64)) for _ in range(2)]
    apply(mini[0], "baseline")
    apply(mini[1], "oelm-lowrank")
    assert flop_model(mini[0]).step(2, 8) == flop_model(mini[1]).step(2, 8)
    assert flop_model(mini[1]).saving(2, 8) == 0


@pytest.mark.parametrize(
    ("name", "per_token"),  # of one layer: multiply-adds of a token in the extras' own matrices
    [
        ("oelm-conv", 2 * 4 * 512),
        ("oelm-core", 512 * 64),  # on q alone, a square per head
        ("oelm-temperature", 0),
        ("oelm-relative", 0),
    ],
)
def test_every_extra_costs_three_times_its_forward_products(name, per_token):
    plain, rich = medium(vocab_size=64), medium(vocab_size=64)
    apply(plain, "oelm-freeze")
    apply(rich, name)
    assert flop_model(rich).step(1, 8).total - flop_model(plain).step(1, 8).total == 3 * 2 * 8 * 6 * per_token


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GPT2", {}),
        ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("Gemma2", {"num_key_value_heads": 2, "head_dim": 32}),
        ("Bloom", {}),
    ],
)
def test_flops_of_decoders_agree_with_torchs_counter(kind, changes):
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**shape, attn_implementation="eager", **changes)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    ids = torch.arange(3 * 16).view(3, 16)
    cost = flop_model(model).step(rows=3, length=16)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    masked = cost.attention / 3  # forward, of which eager attention also computes the masked half
    assert counter.get_total_flops() == cost.forward + 2 * masked


# -- optimizer ------------------------------------------------------------------------------------


def test_optimizer_state_by_name_and_none_for_frozen(tmp_path):
    model = GPT(gpt_config("smoke", vocab_size=40, context=8), torch.Generator().manual_seed(0))
    apply(model, "oelm-freeze")
    optimizer = build_optimizer(model, OptimConfig())
    ids = torch.arange(16).view(2, 8)
    model.loss(ids, ids).backward()
    optimizer.step()
    state = optimizer_state(model, optimizer)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert not frozen & set(state)
    other = build_optimizer(model, OptimConfig())
    load_optimizer_state(model, other, state)
    again = optimizer_state(model, other)
    assert all(torch.equal(again[n][k], v) for n, values in state.items() for k, v in values.items())
    with pytest.raises(OelmError, match="which this model lacks"):
        load_optimizer_state(model, other, {"no.such": {}})


# -- attention statistics -------------------------------------------------------------------------


def test_attention_of_an_untrained_gpt_is_almost_uniform():
    config = GPTConfig(vocab_size=50, context=12, width=16, layers=2, heads=4, ff=32)
    model = GPT(config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    layers = attention_statistics(model, {"ids": ids}, CPU)
    uniform = np.mean([math.log(t) for t in range(1, 13)])
    assert len(layers) == 2
    for layer in layers:
        assert layer["entropy"] == pytest.approx(uniform, rel=1e-3)
        assert len(layer["entropy_heads"]) == 4
        assert layer["logit_scale"] < 0.1
        assert layer["off_orthogonal_q"] > 0.05
    apply(model, "oelm-freeze")
    assert "off_orthogonal_q" not in attention_statistics(model, {"ids": ids}, CPU)[0]  # told where Q/K train
    assert off_orthogonal(torch.linalg.qr(torch.randn(3, 16, 4)).Q.mT) < 1e-6


def test_attention_statistics_ignore_padding():
    config = GPTConfig(vocab_size=50, context=12, width=16, layers=1, heads=2, ff=32, classes=2, causal=False)
    model = GPT(config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([ids, torch.zeros(2, 4, dtype=torch.long)], 1)
    lengths = torch.tensor([6, 6])
    plain = attention_statistics(model, {"ids": ids, "lengths": lengths}, CPU)
    assert attention_statistics(model, {"ids": padded, "lengths": lengths}, CPU) == plain


# -- memory ---------------------------------------------------------------------------------------


def test_out_of_memory_is_recognised_and_nothing_else_is():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert bytes_text(490 * 2**20) == "490 MiB"
