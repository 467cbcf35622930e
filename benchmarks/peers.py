"""Training steps of other tools ("peers"), with which our training step is compared.

All peers train a GPT with the original study's architecture (pre-LN, tied head, learned positions, no
dropout) in fp32, on batches of the same shape, with gradient clipping at 1.0.

- `nanogpt`: a training step as in Karpathy's nanoGPT on a CPU. It has one fused qkv projection, exact GELU,
  all logits in memory, and AdamW with betas (0.9, 0.95) and weight decay on matrices only. AdamW is not
  fused, because nanoGPT fuses it only on CUDA. Every step cuts a batch from one array of tokens.
- `transformers`: GPT-2 of transformers in a plain loop, with fused AdamW.
- `trainer`: the same model in the Hugging Face Trainer, with fused AdamW.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.bench.methods import step_facts, token_batch, training_bytes
from oelm.bench.worker import Arm, OwnLoop, Turns
from oelm.models.gpt import GPTConfig, gpt_config
from oelm.models.huggingface import gpt2_config

PEERS = ("nanogpt", "transformers", "trainer")


def build(spec: dict[str, Any]) -> Arm:
    """Return the arm of the peer `spec["peer"]`. The worker process of the arm calls this function."""
    config = gpt_config(spec["size"], vocab_size=spec["vocabulary"], context=spec["context"])
    if spec["peer"] == "nanogpt":
        return build_nanogpt(config, spec)
    if spec["peer"] == "transformers":
        return build_transformers(config, spec)
    assert spec["peer"] == "trainer", spec["peer"]
    rows = token_batch(spec)[:, :-1]
    model = gpt2(config)
    examples = [{"input_ids": row, "labels": row} for row in rows] * 1000
    return Arm(facts=step_facts(model, token_batch(spec)), own_loop=run_trainer(model, examples, len(rows)))


class NanoBlock(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.c_attn = nn.Linear(c.width, 3 * c.width, bias=False)
        self.c_proj = nn.Linear(c.width, c.width, bias=False)
        self.up, self.down = nn.Linear(c.width, c.ff), nn.Linear(c.ff, c.width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(d, dim=2)
        q, k, v = (part.view(B, T, self.heads, d // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(NanoBlock(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.width)
        self.lm_head = nn.Linear(c.width, c.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                narrow = name.endswith(("c_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.layers) if narrow else 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V); stays in memory until the backward pass
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def build_nanogpt(config: GPTConfig, spec: dict[str, Any]) -> Arm:
    model = NanoGPT(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    tokens = np.random.default_rng(spec["seed"]).integers(0, spec["vocabulary"], 1_000_000).astype(np.uint16)
    draw = torch.Generator().manual_seed(spec["seed"])
    length, batch = spec["context"], spec["batch"]

    def next_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - length - 1, (batch,), generator=draw).tolist()
        x = torch.stack([torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
        return x, y

    def step() -> None:
        loss = model(*next_batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Arm(step, step_facts(model, token_batch(spec)), training_bytes(model, optimizer))


def gpt2(config: GPTConfig) -> nn.Module:
    """Return a GPT-2 of transformers with the sizes of `config` and the default activation of GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = gpt2_config(config)
    shape.activation_function = GPT2Config().activation_function
    return GPT2LMHeadModel(shape).train()


def build_transformers(config: GPTConfig, spec: dict[str, Any]) -> Arm:
    model, ids = gpt2(config), token_batch(spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = ids[:, :-1].contiguous()

    def step() -> None:
        model(input_ids=rows, labels=rows).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Arm(step, step_facts(model, ids), training_bytes(model, optimizer))


def run_trainer(model: Any, rows: Any, batch: int, **options: Any) -> OwnLoop:
    """Return a function that runs the Hugging Face Trainer and measures its steps with callbacks.

    The Trainer logs, saves and prints nothing.

    options: further `TrainingArguments`, and `data_collator` of the Trainer
    """

    def loop(turns: Turns) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Clock(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                turns.step_begins()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                turns.step_ended()

        own = {name: options.pop(name) for name in ("data_collator",) if name in options}
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=100_000,
                learning_rate=3e-4,
                optim="adamw_torch_fused",
                max_grad_norm=1.0,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
                **options,
            )
            Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()], **own).train()

    return loop
