"""The arms of a step benchmark: any method of the registry on our GPT or an encoder, and the peers.

A spec is plain data, so that it can cross into another process:
    {"kind": "step", "arm": "oelm-freeze", "method": "oelm-freeze", "size": "medium-512", "vocabulary": 50257,
     "context": 512, "batch": 4, "seed": 0}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.bench import peers
from oelm.bench.turns import Drives, trainer_in_turns
from oelm.models.gpt import GPT, gpt_config
from oelm.training.measure.flops import flop_model

PEERS = {
    "plain": "a plain eager GPT in the manner of small public trainers",
    "transformers": "transformers' GPT-2 in its usual loop, fused AdamW",
    "transformers-matched": "the same with exact GELU in one operation and no key-value cache",
    "trainer": "transformers' GPT-2 in the Hugging Face Trainer, fused AdamW",
}
COMPILED = "-compiled"  # behind a method's name: its loss through torch.compile
GEMM = "gemm"  # not a model: the machine's matrix product, measured in the same rounds
ENCODERS = ("minilm", "tiny-bert")  # sizes that are transformers encoders with a head of two classes


@dataclass
class Arm:
    step: Callable[[], object]
    facts: dict[str, Any] = field(default_factory=dict)
    memory: Callable[[], dict[str, int]] = dict  # bytes held by gradients and optimizer state
    drives: Drives | None = None  # for an arm with a loop of its own


def build(spec: dict[str, Any]) -> Arm:
    if spec["kind"] == "classification":
        from oelm.bench import classification_arms

        return classification_arms.build(spec)
    name = spec["arm"]
    if name == GEMM:
        return _gemm()
    draw = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(spec["vocabulary"], (spec["batch"], spec["context"] + 1), generator=draw)
    if name not in PEERS:
        return _ours(spec, ids)
    config = gpt_config(spec["size"], vocab_size=spec["vocabulary"], context=spec["context"])
    if name == "trainer":
        model, row = peers.gpt2(config), ids[:, :-1]
        rows = [{"input_ids": r, "labels": r} for r in row] * 1000
        return Arm(lambda: None, _facts(model, ids), drives=trainer_in_turns(model, rows, len(row)))
    model, optimizer, step = getattr(peers, name.replace("-", "_"))(config, ids)
    return Arm(step, _facts(model, ids), held(model, optimizer))


def _ours(spec: dict[str, Any], ids: Tensor) -> Arm:
    """A network under a method, with the parts of the training loop."""
    from oelm.config.run_config import OptimConfig
    from oelm.methods.apply import apply
    from oelm.training.optimizer import build_optimizer, clip_gradients

    model, loss_of = (_encoder if spec["size"] in ENCODERS else _gpt)(spec, ids)
    apply(model, spec["method"], seed=spec["seed"])
    optimizer = build_optimizer(model, OptimConfig())
    if spec["arm"].endswith(COMPILED):
        loss_of = torch.compile(loss_of)

    def step() -> None:
        loss_of().backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Arm(step, _facts(model, ids, counted=True), held(model, optimizer))


def _gpt(spec: dict[str, Any], ids: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    config = gpt_config(
        spec["size"],
        vocab_size=spec["vocabulary"],
        context=spec["context"],
        position=spec.get("position", "learned"),
        **spec.get("shape", {}),
    )
    model = GPT(config, torch.Generator().manual_seed(spec["seed"]))
    x, y = ids[:, :-1], ids[:, 1:]
    return model, lambda: model.loss(x, y)


def _encoder(spec: dict[str, Any], ids: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A BERT that classifies: no vocabulary head, so the blocks are nearly all of its matrix products."""
    from oelm.config.run_config import DataConfig, ModelConfig, RunConfig
    from oelm.methods.presets import method
    from oelm.training.networks import build_network
    from oelm.training.tasks.classification import class_logits

    config = RunConfig(
        id="bench",
        study="bench",
        task="classification",
        data=DataConfig(dataset="", max_length=spec["context"]),
        model=ModelConfig("hf", spec["size"], pretrained=spec["size"] == "minilm", dropout=0.0),
        method=method("baseline"),
        seed=spec["seed"],
    )
    model: Any = build_network(config, vocab_size=spec["vocabulary"], classes=2, pad_id=0, eos_id=1)
    model.train()
    rows = ids[:, :-1] % model.config.vocab_size
    tensors = {"ids": rows, "lengths": torch.full((len(rows),), rows.shape[1])}
    labels = torch.arange(len(rows)) % 2
    return model, lambda: nn.functional.cross_entropy(class_logits(model, tensors), labels)


def _gemm() -> Arm:
    a = torch.ones(2048, 2048)

    def step() -> None:
        for _ in range(4):
            a @ a

    return Arm(step, {"flops": 4 * 2.0 * 2048**3})


def _facts(model: nn.Module, ids: Tensor, *, counted: bool = False) -> dict[str, Any]:
    """`counted`: with FLOPs. The peers do the same matrix products, ours say how many."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    facts: dict[str, Any] = {
        "tokens": rows * length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    if counted:
        flops = flop_model(model)
        facts |= {"flops": flops.step(rows, length).total, "predicted_saving": flops.saving(rows, length)}
    return facts


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], dict[str, int]]:
    """Bytes that training keeps besides the weights; nothing for what is frozen."""

    def count() -> dict[str, int]:
        states = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        return {
            "gradient_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer_bytes": sum(v.nbytes for v in states),
        }

    return count
