"""The arms of a classification benchmark: our loop, our loop with every row padded to 512, the Trainer.

All train the same network from the same weights on the same encoded rows, with as many rows per optimizer
step. Steps differ in length, so each arm's own plan for an epoch is sampled evenly over the lengths of its
batches: every round has short ones and long ones in the epoch's proportion.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from oelm.bench.arms import Arm, held
from oelm.bench.turns import trainer_in_turns
from oelm.config.run_config import BudgetConfig, DataConfig, Machine, ModelConfig, OptimConfig, RunConfig
from oelm.data.batches.classification import EncodedSplit
from oelm.methods.presets import method
from oelm.training.networks import MINILM_PACKAGE
from oelm.training.prepare import Prepared, prepare
from oelm.training.tasks.classification import Classification

OURS, PADDED, TRAINER = "oelm", "padded-to-512", "trainer"
ARMS = (OURS, PADDED, TRAINER)
MAX_LENGTH = 512


def model_name() -> str:
    """MiniLM where its package is installed, a tiny random BERT otherwise."""
    return "minilm" if importlib.util.find_spec(MINILM_PACKAGE) else "tiny-bert"


def spread(longest: np.ndarray, turns: int, steps: int) -> list[list[int]]:
    """Which batches each turn takes: evenly spaced over all batches by length, in each turn as in the whole.

    Dealt out to and fro, so that no turn has the longer one of every pair.

    >>> spread(np.array([30, 10, 20, 40]), turns=2, steps=2)
    [[1, 3], [2, 0]]
    """
    order = np.argsort(longest, kind="stable")
    places = ((np.arange(turns * steps) + 0.5) * len(order) / (turns * steps)).astype(int)
    hands = order[places].reshape(steps, turns)
    hands[1::2] = hands[1::2, ::-1]
    return hands.T.tolist()


def build(spec: dict[str, Any]) -> Arm:
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
    turns = [[full[place] for place in places] for places in spread(longest, spec["rounds"], spec["steps"])]
    turns = [turns[0]] * spec["warmup"] + turns  # the warm-up's are not counted
    chosen = [number for turn in turns[spec["warmup"] :] for number in turn]
    real = sum(int(lengths[batches[number]].sum()) for number in chosen)
    padded = sum(
        rows * (MAX_LENGTH if spec["arm"] == PADDED else int(lengths[batches[number]].max()))
        for number in chosen
    )
    facts = {
        "samples": spec["steps"] * rows,  # of a turn
        "tokens_per_sample": real / len(chosen) / rows,
        "padding_share": 1 - real / padded,
        "origin": prepared.data_facts["origin"],
        "model": spec["model"],
    }
    if spec["arm"] == TRAINER:
        return _trainer(spec, prepared, [batches[number] for turn in turns for number in turn], facts)
    return _ours(spec, prepared, turns, facts)


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
        method=method("baseline"),
        optim=OptimConfig(schedule="constant"),
        budget=BudgetConfig(batch_size=spec["rows"], epochs=1),
        seed=spec["seed"],
    )


def _ours(spec: dict[str, Any], prepared: Prepared, turns: list[list[int]], facts: dict[str, Any]) -> Arm:
    from oelm.methods.apply import apply
    from oelm.training.optimizer import build_optimizer, clip_gradients
    from oelm.training.tasks.task import Objective

    config, task, model = _config(spec), prepared.task, prepared.model.train()
    apply(model, config.method, seed=config.seed)
    optimizer = build_optimizer(model, config.optim)
    objective = Objective(model, task)
    coming = iter(turns)

    def step() -> None:
        for number in next(coming):
            for batch in task.micro_batches(number, spec["rows"]):
                (objective(batch.tensors) / batch.weight).backward()
            clip_gradients(model.parameters(), config.optim.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Arm(step, facts, held(model, optimizer))


def _trainer_order(lengths: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """One epoch of the Trainer's own sampler for `train_sampling_strategy="group_by_length"`."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    draw = torch.Generator().manual_seed(seed)
    return np.array(list(LengthGroupedSampler(rows, lengths=lengths.tolist(), generator=draw)))


def _trainer(
    spec: dict[str, Any], prepared: Prepared, batches: list[np.ndarray], facts: dict[str, Any]
) -> Arm:
    """Dynamic padding by transformers' collator, the sampler's batches in the order of the turns.

    Rows are a list in memory, the fastest a Trainer can get: no reading of an Arrow table is counted.
    """
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast

    inner = prepared.tokenizer._inner
    pad = inner.id_to_token(prepared.tokenizer.pad_id)
    collate = DataCollatorWithPadding(PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad))
    ours: Any = prepared.model
    theirs = type(ours)(ours.config)  # transformers' own forward pass, from the same weights
    theirs.load_state_dict(ours.state_dict())
    split: EncodedSplit = prepared.task.splits["train"]  # type: ignore[attr-defined]
    rows = [_features(split, int(number)) for batch in batches for number in batch]
    drives = trainer_in_turns(
        theirs,
        rows,
        spec["rows"],
        steps=spec["steps"],
        train_sampling_strategy="sequential",  # they come in the order of its own sampler's batches
        lr_scheduler_type="constant",
        weight_decay=0.01,
        data_collator=collate,
    )
    return Arm(lambda: None, facts, drives=drives)


def _features(split: EncodedSplit, row: int) -> dict[str, Any]:
    ids = split.ids[split.offsets[row] : split.offsets[row + 1]].tolist()
    second = int(split.seconds[row])
    return {
        "input_ids": ids,
        "token_type_ids": [int(place >= second) for place in range(len(ids))],
        "attention_mask": [1] * len(ids),
        "labels": int(split.labels[row]),
    }
