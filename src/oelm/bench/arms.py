"""The arms of a step benchmark: any method of the registry on our GPT, and the peers.

A spec is plain data, so that it can cross into another process:
    {"arm": "oelm-freeze", "size": "medium-512", "vocabulary": 50257, "context": 512, "batch": 4, "seed": 0}
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oelm.bench import peers
from oelm.models.gpt import GPT, GPTConfig, gpt_config

PEERS = {
    "plain": "a plain eager GPT in the manner of small public trainers",
    "transformers": "transformers' GPT-2 in its usual loop, fused AdamW",
    "trainer": "transformers' GPT-2 in the Hugging Face Trainer, fused AdamW",
}
GEMM = "gemm"  # not a model: the machine's matrix product, measured in the same rounds


# wait() sleeps until the next step is asked for (False: no more), answer(...) reports it
Drives = Callable[[Callable[[], bool], Callable[[dict[str, Any]], None]], None]


@dataclass
class Arm:
    step: Callable[[], float]
    facts: dict[str, Any] = field(default_factory=dict)
    memory: Callable[[], dict[str, int]] = dict  # bytes held by gradients and optimizer state
    drives: Drives | None = None  # for an arm with a loop of its own


def build(spec: dict[str, Any]) -> Arm:
    name = spec["arm"]
    if name == GEMM:
        return _gemm()
    config = gpt_config(
        spec["size"],
        vocab_size=spec["vocabulary"],
        context=spec["context"],
        position=spec.get("position", "learned"),
        **spec.get("shape", {}),
    )
    draw = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(config.vocab_size, (spec["batch"], config.context + 1), generator=draw)
    if name == "trainer":
        return _trainer(config, ids)
    if name in PEERS:
        model, optimizer, step = getattr(peers, name)(config, ids)
    else:
        model, optimizer, step = _ours(name, config, ids, spec)
    return Arm(step, _facts(model, ids, name), _held(model, optimizer))


def _ours(
    method: str, config: GPTConfig, ids: Tensor, spec: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer, peers.Step]:
    """Our GPT under a method, with the parts of the training loop."""
    from oelm.methods.apply import apply
    from oelm.training.config import OptimConfig
    from oelm.training.optimizer import build_optimizer, clip_gradients

    model = GPT(config, torch.Generator().manual_seed(spec["seed"]))
    apply(model, method, seed=spec["seed"])
    optimizer = build_optimizer(model, OptimConfig())
    loss_of: Any = torch.compile(model.loss) if spec.get("compile") else model.loss
    x, y = ids[:, :-1], ids[:, 1:]

    def step() -> float:
        loss = loss_of(x, y)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


def _trainer(config: GPTConfig, ids: Tensor) -> Arm:
    """The Hugging Face Trainer runs its own loop: it is held at the end of each step until told to go on."""
    import os
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = peers.gpt2(config)
    row = ids[:, :-1]
    rows = [{"input_ids": r, "labels": r} for r in row] * 1000
    arm = Arm(lambda: 0.0, _facts(model, ids, "trainer"))

    def drives(wait: Callable[[], bool], answer: Callable[[dict[str, Any]], None]) -> None:
        class Turns(TrainerCallback):
            start = 0.0

            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                if not self.start:
                    self.hold()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                answer({"seconds": time.perf_counter() - self.start})
                self.hold()

            def hold(self) -> None:
                if not wait():
                    os._exit(0)  # the Trainer has no gentle way to leave a step
                self.start = time.perf_counter()

        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=len(row),
                max_steps=1000,
                learning_rate=3e-4,
                optim="adamw_torch_fused",
                max_grad_norm=1.0,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Turns()])
            trainer.train()

    arm.drives = drives
    return arm


def _gemm() -> Arm:
    a = torch.ones(2048, 2048)

    def step() -> float:
        for _ in range(4):
            a @ a
        return 0.0

    return Arm(step, {"flops": 4 * 2.0 * 2048**3})


def _facts(model: nn.Module, ids: Tensor, name: str) -> dict[str, Any]:
    from oelm.training.flops import flop_model

    rows, length = ids.shape[0], ids.shape[1] - 1
    facts: dict[str, Any] = {
        "tokens": rows * length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    if name not in PEERS:
        flops = flop_model(model)
        facts |= {"flops": flops.step(rows, length).total, "predicted_saving": flops.saving(rows, length)}
    return facts


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], dict[str, int]]:
    def held() -> dict[str, int]:
        states = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        return {
            "gradient_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "optimizer_bytes": sum(v.nbytes for v in states),
        }

    return held
