"""What a user would train the same GPT with instead: the peers our step is measured against.

All have the study's architecture (pre-LN, GELU, tied head, learned positions), the same batch, no dropout,
fp32, gradient clipping at 1.0, and AdamW. `plain` is written here in the manner of small public GPT trainers:
readable eager code, logits in memory, the optimizer's default loop. `transformers` is GPT-2 as its config
gives it to a user, with the tanh form of GELU; `transformers-matched` is tuned towards ours: exact GELU in
one operation, no key-value cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oelm.models.gpt import GPTConfig
from oelm.models.huggingface import gpt2_config

Step = Callable[[], float]  # one whole optimizer step -> the loss


class _PlainBlock(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=False)
        self.proj = nn.Linear(c.width, c.width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(c.width, c.ff), nn.GELU(), nn.Linear(c.ff, c.width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(d, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, d))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.width)
        self.wpe = nn.Embedding(c.context, c.width)
        self.blocks = nn.Sequential(*(_PlainBlock(c) for _ in range(c.layers)))
        self.ln_f = nn.LayerNorm(c.width)
        self.lm_head = nn.Linear(c.width, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        logits = self.lm_head(self.ln_f(self.blocks(x)))  # (B, T, V), kept for the backward pass
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def plain(config: GPTConfig, ids: Tensor) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    model = PlainGPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return model, optimizer, step


def gpt2(config: GPTConfig) -> nn.Module:
    """transformers' own GPT-2 of the same shape, with GPT-2's own activation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = gpt2_config(config)
    shape.activation_function = GPT2Config().activation_function
    return GPT2LMHeadModel(shape)


def transformers(config: GPTConfig, ids: Tensor) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """transformers' GPT-2 in its usual loop, with the fused AdamW that ours has."""
    return _transformers_loop(gpt2(config), ids)


def transformers_matched(config: GPTConfig, ids: Tensor) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """The same with our activation and without the cache that training has no use for."""
    from transformers import GPT2LMHeadModel

    return _transformers_loop(GPT2LMHeadModel(gpt2_config(config)), ids, use_cache=False)


def _transformers_loop(
    model: nn.Module, ids: Tensor, **options: bool
) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    rows = ids[:, :-1].contiguous()

    def step() -> float:
        loss = model(input_ids=rows, labels=rows, **options).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return model, optimizer, step
