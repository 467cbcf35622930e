"""Two real ranks give the losses of one process, and stop and resume like one process."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks

from oelm.config.run_config import Machine, RunConfig
from oelm.errors import UsageError
from oelm.methods.audit import audit
from oelm.methods.saving.load import load
from oelm.runs.folder import RunFolder
from oelm.training import setup
from oelm.training.fit import fit
from oelm.training.parallel.world import World, choose_device, make_world
from oelm.training.tasks.lm import LanguageModelling

STEPS = 4
# (name, time limit in seconds). A run with a time limit stops after its first step.
STOPPED = [("stopped", 1e-6), ("stopped", 1e-6), ("stopped", 0.0)]
JOBS = [
    *[("lm", 0.0), ("gpt-cls", 0.0), ("uninterrupted", 0.0), *STOPPED],
    *[("sharded-lm", 0.0), ("sharded-bert", 0.0), ("sharded-uninterrupted", 0.0)],
    *[(f"sharded-{name}", limit) for name, limit in STOPPED],
    ("sharded-after-one-process", 0.0),  # one process takes its first step
    ("sharded-before-one-process", 1e-6),  # one process takes its last steps
    ("signal-while-preparing", 0.0),
]


def configs(make: Any) -> dict[str, RunConfig]:
    """Accumulation, a schedule that unfreezes, and a number of rows that two does not divide."""
    odd_rows = {"model": {"dropout": 0.0}, "data": {"train_rows": 37}}
    budget = {"accumulation": 2, "steps": STEPS, "eval_every": STEPS, "log_every": 1}
    dropout = make("lm", model={"dropout": 0.1}, budget={"steps": STEPS, "eval_every": 2, "log_every": 1})
    lm = make("lm", "oelm-gradual", **odd_rows, budget=budget)
    return {
        "lm": lm,
        "after-one-process": lm,
        "before-one-process": lm,
        "gpt-cls": make("gpt-cls", "oelm-gradual", **odd_rows, budget=budget),
        "bert": make("bert", "oelm-freeze", **odd_rows, budget=budget),
        "uninterrupted": dropout,
        "stopped": dropout,
        "signal-while-preparing": dropout,
    }


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, machine: Machine, make: Any, reference: Any
) -> dict[str, RunFolder]:
    """The folders of all two-rank runs, trained one after the other by the same two processes."""
    root = tmp_path_factory.mktemp("two")
    for shape in ("lm", "gpt-cls", "bert"):
        reference(configs(make)[shape])  # also fills the cache of encoded data
    started_by_one = root / "sharded-after-one-process"
    fit(configs(make)["lm"], started_by_one, replace(machine, time_limit=1e-6))
    assert run_ranks(lambda rank: train_jobs(rank, root, machine, configs(make))) == [0, 0]
    return {name: RunFolder(root / name) for name, _ in JOBS}


def train_jobs(rank: int, root: Path, machine: Machine, by_name: dict[str, RunConfig]) -> int:
    counts = count_sharded_parameters()
    dist.init_process_group("gloo")  # once for all runs
    for name, limit in JOBS:
        shape, shard = name.removeprefix("sharded-"), name.startswith("sharded-")
        if name == "signal-while-preparing" and rank == 0:
            signal_while_preparing()
        fit(by_name[shape], root / name, replace(machine, time_limit=limit, shard=shard))
        if shard:
            (root / name / f"counts-{rank}.json").write_text(json.dumps(counts), encoding="utf-8")
    return 0


def count_sharded_parameters() -> dict[str, int]:
    """Count the parameters that this rank holds, and the gradient elements that FSDP sends."""
    from oelm.training.parallel.sharding import ShardedWorld

    # The function that sends gradients has another name in newer versions of torch.
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    counts, place_model, send = {"held": 0, "sent": 0}, ShardedWorld.place_model, getattr(dist, name)

    def counting_place_model(world: ShardedWorld, model: torch.nn.Module) -> None:
        place_model(world, model)
        counts.update(held=sum(p.to_local().numel() for p in model.parameters()), sent=0)

    def counting_send(*, input: torch.Tensor, **named: Any) -> Any:
        counts["sent"] += input.numel()
        return send(input=input, **named)

    ShardedWorld.place_model = counting_place_model  # type: ignore[method-assign]
    setattr(dist, name, counting_send)
    return counts


def signal_while_preparing() -> None:
    """Let this rank receive SIGTERM while it encodes data."""
    prepare = setup.prepare

    def interrupted_prepare(config: RunConfig, machine: Machine, report: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        report(None)
        return prepare(config, machine, report)

    setup.prepare = interrupted_prepare


def losses(folder: RunFolder, kind: str) -> list[float]:
    return [row.values["loss"] for row in folder.metrics(kind)]


def assert_same_losses(two: RunFolder, one: RunFolder) -> None:
    assert two.status().state == "finished"
    for kind in ("train", "validation"):
        assert losses(two, kind) == pytest.approx(losses(one, kind), rel=1e-4)
    assert two.results().test.loss == pytest.approx(one.results().test.loss, rel=1e-4)
    assert two.results().test.n == one.results().test.n
    assert two.results().parameters == one.results().parameters
    assert two.freeze_audit().end.ok
    assert [row.step for row in two.metrics("train")] == list(range(1, STEPS + 1))  # one writer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm", "gpt-cls", "sharded-lm", "sharded-bert", "sharded-after-one-process"])
def test_two_ranks_give_the_losses_of_one_process(make, runs, reference, name):
    config = configs(make)[name.removeprefix("sharded-")]
    assert_same_losses(runs[name], RunFolder(reference(config)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "sharded-"])
def test_two_ranks_stop_together_and_resume_exactly(runs, kind):
    stopped, uninterrupted = runs[f"{kind}stopped"], runs[f"{kind}uninterrupted"]
    assert stopped.status().state == "finished"
    assert stopped.status().resumes == 2
    for name in ("metrics.jsonl", "results.json", "latest.pt"):
        assert (stopped.path / name).read_bytes() == (uninterrupted.path / name).read_bytes(), name


@pytest.mark.slow
def test_one_process_resumes_a_sharded_run(machine, make, runs, reference):
    config, folder = configs(make)["lm"], runs["sharded-before-one-process"]
    assert folder.status().state == "interrupted"
    assert fit(config, folder.path, machine).state == "finished"
    assert_same_losses(folder, RunFolder(reference(config)))


@pytest.mark.slow
def test_a_signal_while_rank_0_prepares_data_stops_both_ranks_before_training(runs):
    folder = runs["signal-while-preparing"]
    assert folder.status().state == "interrupted"
    assert "stopped by SIGTERM while preparing" in folder.status().reason
    assert not folder.metrics_file.exists()


@pytest.mark.slow
def test_each_rank_holds_half_of_a_sharded_model_and_the_saved_model_is_complete(runs):
    run = runs["sharded-uninterrupted"]
    counts = run.results().parameters
    assert counts.frozen > 0
    for rank in range(2):
        facts = json.loads((run.path / f"counts-{rank}.json").read_text(encoding="utf-8"))
        assert facts["held"] / counts.total == pytest.approx(0.5, abs=0.01)
        assert facts["sent"] == STEPS * counts.trainable  # nothing is sent for frozen parameters
    best = load(run.best)
    assert type(best).__name__ == "GPT"
    assert sum(p.numel() for p in best.parameters()) == counts.total
    assert audit(best).ok


@pytest.mark.slow
def test_when_one_rank_runs_out_of_memory_the_next_attempt_uses_smaller_micro_batches(
    tmp_path, machine, make, reference
):
    """The other rank is blocked in all-reduce, so both ranks must end and start again."""
    budget = {"batch_size": 8, "steps": STEPS, "eval_every": 2, "log_every": 1}
    config, folder = make("lm", model={"dropout": 0.0}, budget=budget), RunFolder(tmp_path)
    roomy = RunFolder(reference(config))

    def train(rank: int) -> int:
        loss = LanguageModelling.loss

        def limited_loss(task: Any, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            if rank == 1 and len(tensors["ids"]) > 1 and model.training:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss(task, model, tensors)

        LanguageModelling.loss = limited_loss  # type: ignore[method-assign]
        return fit(config, tmp_path, machine).exit_code

    reasons = []
    while not reasons or folder.status().state == "interrupted":
        run_ranks(train)
        reasons.append(folder.status().reason)
        assert len(reasons) <= 3
    assert [reason[:43] for reason in reasons] == [
        "out of memory with micro-batches of 8 rows ",
        "out of memory with micro-batches of 4 rows ",
        "",
    ]
    assert "micro-batches now have 2 rows" in folder.log_file.read_text(encoding="utf-8")
    assert_same_losses(folder, roomy)


def test_one_process_alone_changes_nothing():
    with World("cpu") as world:
        assert world.is_main
        assert world.sum([1.5, 2.0]) == [1.5, 2.0]
        assert world.gather("x") == ["x"]
        assert world.own_rows(3) == [0, 1, 2]
        assert list(world.own_batches("ab")) == [("a", True), ("b", True)]
        module = torch.nn.Linear(2, 2)
        assert world.average_gradients(module) is module


@pytest.mark.filterwarnings("error::FutureWarning")
def test_ddp_drops_the_process_group_before_it_is_destroyed(tmp_path, monkeypatch):
    """Otherwise the reducer would join gloo's thread while it holds the GIL: a deadlock."""
    monkeypatch.setenv("OELM_RANK_DIR", str(tmp_path))
    world = World("cpu")
    seen = []
    destroy = torch.distributed.destroy_process_group

    def noted_destroy():
        seen.append((module.reducer, module.logger, module.process_group))
        destroy()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", noted_destroy)
    world._init_process_group("gloo")  # of one rank: `World` itself opens none for fewer than two
    world.size, world._joined = 2, True
    module = world.average_gradients(torch.nn.Linear(2, 2))  # kept alive, as by a traceback
    world.__exit__()
    assert seen == [(None, None, None)]
    assert not torch.distributed.is_initialized()


def test_sharding_needs_several_processes():
    with pytest.raises(UsageError, match="but this run has only one"):
        make_world(Machine(device="cpu", shard=True))


def test_a_sharded_model_cannot_be_compiled(tmp_path, machine, make, monkeypatch):
    monkeypatch.setattr("oelm.training.fit.make_world", lambda machine: World(machine.device))
    with pytest.raises(UsageError, match="compile=false"):
        fit(replace(make(), compile=True), tmp_path, replace(machine, shard=True))


def test_ranks_without_a_batch_in_the_last_round_repeat_one(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert list(World("cpu").own_batches("abcde")) == [("b", True), ("d", True), ("e", False)]


def test_devices_that_do_not_exist_are_errors():
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no CUDA device"):
            choose_device("cuda")
        assert choose_device("auto").type == "cpu"
