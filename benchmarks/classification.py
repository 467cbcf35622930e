"""`python -m benchmarks classification`: compare the samples per second of three training loops.

The arms are our loop, our loop with every row padded to 512 tokens, and the Hugging Face Trainer. All train
the same model from the same weights on the same encoded rows, and use equally many rows per optimizer step.
Batches differ in length, so each turn (consecutive steps of one arm) takes batches from the whole range of
lengths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers import run_trainer
from oelm.bench.harness import Measured, Plan, Progress, measure_alone, ratio
from oelm.bench.methods import training_bytes
from oelm.bench.worker import Arm
from oelm.config.run_config import BudgetConfig, DataConfig, Machine, ModelConfig, OptimConfig, RunConfig
from oelm.data.batches.classification import EncodedSplit
from oelm.methods.presets import find_method
from oelm.training.prepare import Prepared, prepare
from oelm.training.tasks.classification import Classification

OURS, PADDED, TRAINER = "oelm", "padded-to-512", "trainer"
ARMS = (OURS, PADDED, TRAINER)
MAX_LENGTH = 512


@dataclass(frozen=True)
class ClassificationBench:
    """The settings of the benchmark, which compares all arms on each dataset."""

    datasets: tuple[str, ...] = ("agnews", "mnli", "imdb")
    model: str = "minilm"
    rows: int = 16  # per optimizer step
    dropout: float = 0.1
    train_rows: int = 0  # 0 = the whole split
    data_dir: str = ""  # "" = use generated text in place of the datasets
    cache_dir: str = ""
    plan: Plan = field(default_factory=lambda: Plan(steps=4, warmup=1))

    def specs(self, dataset: str) -> list[dict[str, Any]]:
        shared = {**asdict(self), "build": "benchmarks.classification:build", "dataset": dataset, "seed": 0}
        del shared["datasets"]
        return [{**shared, "arm": arm} for arm in ARMS]


def run(bench: ClassificationBench, progress: Progress) -> dict[str, Any]:
    found = []
    for dataset in bench.datasets:
        measured = measure_alone(
            bench.specs(dataset), bench.plan, lambda text, name=dataset: progress(f"{name}: {text}")
        )
        found.append({"dataset": dataset, **summarise(measured)})
    settings = {
        **asdict(bench),
        **asdict(bench.plan),
        "threads": bench.plan.thread_count,
        "max_length": MAX_LENGTH,
    }
    for name in ("plan", "data_dir", "cache_dir"):  # paths do not affect speed, and `origin` names the data
        del settings[name]
    return {"kind": "classification", "settings": settings, "comparisons": found}


def summarise(measured: dict[str, Measured]) -> dict[str, Any]:
    """Return the samples per second of each arm, and by which factor our loop is faster than the arm."""
    ours = measured[OURS]
    arms = []
    for name, arm in measured.items():
        mean = float(np.mean(arm.steps))
        arms.append(
            {
                "name": name,
                "samples_per_second": arm.facts["rows"] / mean,
                "speedup_of_ours": ratio(arm.rounds, ours.rounds).to_dict(),
                **arm.to_dict(),
            }
        )
    return {"origin": ours.facts["origin"], "arms": arms}


def spread(longest: np.ndarray, turns: int, steps: int) -> list[list[int]]:
    """Return the batch numbers of each turn, so that every turn covers the whole range of batch lengths.

    Batches are sorted by length, evenly spaced ones are chosen, and these are distributed to the turns in
    alternating order, so that no turn always gets the longer batches.

    longest: length of the longest row of each batch

    >>> spread(np.array([30, 10, 20, 40]), turns=2, steps=2)
    [[1, 3], [2, 0]]
    """
    order = np.argsort(longest, kind="stable")
    places = ((np.arange(turns * steps) + 0.5) * len(order) / (turns * steps)).astype(int)
    hands = order[places].reshape(steps, turns)
    hands[1::2] = hands[1::2, ::-1]
    return hands.T.tolist()


# -- in the worker process ----------------------------------------------------------------------------------


def build(spec: dict[str, Any]) -> Arm:
    plan = Plan(**spec["plan"])
    prepared = prepare(_config(spec), Machine(data_dir=spec["data_dir"], cache_dir=spec["cache_dir"]))
    task = prepared.task
    assert isinstance(task, Classification)
    lengths, rows = task.plan.lengths, spec["rows"]
    if spec["arm"] == TRAINER:
        order = _trainer_order(lengths, rows, spec["seed"])
        batches = [order[i : i + rows] for i in range(0, len(order), rows)]
    else:
        batches = [task.plan.batch(number) for number in range(task.plan.batches_per_epoch)]
    full = [number for number, batch in enumerate(batches) if len(batch) == rows]
    longest = np.array([lengths[batches[number]].max() for number in full])
    turns = [[full[place] for place in places] for places in spread(longest, plan.rounds, plan.steps)]
    # The first batch of each turn is used twice, because the first step of a turn is not counted.
    steps = [*([turns[0][0]] * plan.warmup), *(number for turn in turns for number in (turn[0], *turn))]
    real = sum(int(lengths[batches[number]].sum()) for turn in turns for number in turn)
    padded = sum(
        rows * (MAX_LENGTH if spec["arm"] == PADDED else int(lengths[batches[number]].max()))
        for turn in turns
        for number in turn
    )
    facts = {
        "rows": rows,
        "tokens_per_sample": real / rows / plan.rounds / plan.steps,
        "padding_share": 1 - real / padded,
        "origin": prepared.data_facts.origin,
    }
    if spec["arm"] == TRAINER:
        return _trainer(spec, prepared, [batches[number] for number in steps], facts)
    return _ours(spec, prepared, steps, facts)


def _config(spec: dict[str, Any]) -> RunConfig:
    pretrained = spec["model"] == "minilm"
    return RunConfig(
        id="bench",
        study="bench",
        task="classification",
        data=DataConfig(
            dataset=spec["dataset"],
            source="local" if spec["data_dir"] else "builtin",
            tokenizer="model" if pretrained else "bpe-512",
            max_length=MAX_LENGTH,
            train_rows=spec["train_rows"],
            eval_rows=8,
            pad_to_max=spec["arm"] == PADDED,
        ),
        model=ModelConfig("hf", spec["model"], pretrained=pretrained, dropout=spec["dropout"]),
        method=find_method("baseline"),
        optim=OptimConfig(schedule="constant"),
        budget=BudgetConfig(batch_size=spec["rows"], epochs=1),
        seed=spec["seed"],
    )


def _ours(spec: dict[str, Any], prepared: Prepared, steps: list[int], facts: dict[str, Any]) -> Arm:
    from oelm.methods.apply import apply
    from oelm.training.optimizer import build_optimizer, clip_gradients
    from oelm.training.tasks.task import Objective

    config, task, model = _config(spec), prepared.task, prepared.model.train()
    apply(model, config.method, seed=config.seed)
    optimizer = build_optimizer(model, config.optim)
    objective = Objective(model, task)
    coming = iter(steps)

    def step() -> None:
        for batch in task.micro_batches(next(coming), spec["rows"]):
            (objective(batch.tensors) / batch.weight).backward()
        clip_gradients(optimizer, config.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Arm(step, facts, training_bytes(model, optimizer))


def _trainer_order(lengths: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """Return the order of rows in one epoch of a Trainer with `train_sampling_strategy="group_by_length"`."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    draw = torch.Generator().manual_seed(seed)
    return np.array(list(LengthGroupedSampler(rows, lengths=lengths.tolist(), generator=draw)))


def _trainer(
    spec: dict[str, Any], prepared: Prepared, batches: list[np.ndarray], facts: dict[str, Any]
) -> Arm:
    """Return the arm that trains with the Hugging Face Trainer.

    The collator pads each batch to its longest row. The rows are a list in memory, which is the fastest kind
    of dataset for a Trainer.
    """
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    inner = prepared.tokenizer._inner
    pad = inner.id_to_token(prepared.tokenizer.pad_id)
    collate = DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad))
    ours: Any = prepared.model
    theirs = type(ours)(ours.config)  # a copy with the original forward pass of transformers
    theirs.load_state_dict(ours.state_dict())
    split: EncodedSplit = prepared.task.splits["train"]  # type: ignore[attr-defined]
    rows = [_features(split, int(number)) for batch in batches for number in batch]
    loop = run_trainer(
        theirs,
        rows,
        spec["rows"],
        train_sampling_strategy="sequential",  # the rows are already in the order of the Trainer's sampler
        lr_scheduler_type="constant",
        weight_decay=0.01,
        data_collator=collate,
    )
    return Arm(facts=facts, own_loop=loop)


def _features(split: EncodedSplit, row: int) -> dict[str, Any]:
    ids = split.ids[split.offsets[row] : split.offsets[row + 1]].tolist()
    second = int(split.second_starts[row])
    return {
        "input_ids": ids,
        "token_type_ids": [int(place >= second) for place in range(len(ids))],
        "attention_mask": [1] * len(ids),
        "labels": int(split.labels[row]),
    }
