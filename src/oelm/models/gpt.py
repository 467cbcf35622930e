"""The GPT of the original study, with a tied LM head or a classification head.

Pre-LN blocks and a final LN, exact GELU, no biases in Q/K/V/O, biases in the MLP, weights from N(0, 0.02).
Positions are learned, or rotary (RoFormer, Su et al. 2021).
Letters in shapes: B = batch, T = tokens, d = width, nh = heads, hs = head size, V = vocabulary.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm import compiled
from oelm.compiled import products
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_json
from oelm.files.read import read_json_object
from oelm.models.gelu import gelu_linear
from oelm.models.loss import cross_entropy_each, cross_entropy_sum
from oelm.models.sizes import GPTConfig, gpt_config
from oelm.models.tied_embedding import TiedGradient, tied_embedding

__all__ = ["GPT", "MLP", "Attention", "Block", "GPTConfig", "gpt_config", "rotary_table", "rotate"]

ROTARY_BASE = 10_000.0


def rotary_table(config: GPTConfig) -> Tensor:
    """Return the factors of the rotary rotation of each position, as (context, 3, d).

    A rotation mixes the elements i and i + hs / 2 of a head. The three rows are the cosine of each element,
    the sine by which the element hs / 2 further on is multiplied, and the sine for the element hs / 2 before.
    A sine is 0 where that element does not belong to the same pair.
    """
    half = config.width // config.heads // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.context, dtype=torch.float64)[:, None] * frequency  # (context, hs / 2)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    head = torch.stack([torch.cat(pair, -1) for pair in ((cos, cos), (-sin, zero), (zero, sin))], dim=1)
    return head.repeat(1, 1, config.heads).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Return x (B, T, nh, hs) with rotary positions applied; `table` (T, 3, d) is from `rotary_table()`."""
    return _Rotate.apply(x, table.to(x.dtype), 1)


class _Rotate(torch.autograd.Function):
    """Rotates by `sign` times the angles of the table, in three operations on rows of d elements.

    Slices of single heads would be only hs / 2 elements long, for which each operation takes several times as
    long on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, sign: int) -> Tensor:
        ctx.save_for_backward(table)
        ctx.sign = sign
        half = x.shape[-1] // 2
        cos, further, before = table.unbind(1)  # (T, d)
        flat = x.flatten(2)  # (B, T, d)
        y = flat * cos
        y[..., :-half].addcmul_(flat[..., half:], further[:, :-half], value=sign)
        y[..., half:].addcmul_(flat[..., :-half], before[:, half:], value=sign)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return _Rotate.apply(upstream[0], table, -ctx.sign), None, None


class Attention(nn.Module):
    """Multi-head attention with separate Q, K, V and output matrices, so that Q and K can be frozen alone."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.causal = config.causal
        self.dropout = config.dropout
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, config.width, bias=False)
        self.v = nn.Linear(config.width, config.width, bias=False)
        self.o = nn.Linear(config.width, config.width, bias=False)
        self.register_parameter("relative_bias", None)

    def add_relative_bias(self, span: int) -> None:
        """Add a trainable bias on the attention scores per head and token distance (Raffel et al. 2020, T5).

        All distances larger than `span` share the bias of distance `span`.
        """
        size = span + 1 if self.causal else 2 * span + 1
        self.relative_bias = nn.Parameter(self.q.weight.new_zeros(self.num_heads, size))

    def forward(
        self, x: Tensor, rotation: Tensor | None, mask: Tensor | None, query: Tensor | None = None
    ) -> Tensor:
        """Return the output (B, T, d) for x (B, T, d).

        rotation: table (T, 3, d) of `rotary_table()`; None = no rotary positions
        mask: (B or 1, 1 or nh, T or 1, T), True where a query may see a key, or numbers to add to the scores;
            None = each query sees the keys up to its own, or all if the GPT is not causal
        query: position (B,) of the only token of each row whose output is needed; the result is (B, 1, d).
            Then `mask` must also hide the tokens that this token does not see.
        """
        B, T, d = x.shape
        q, k, v = (
            products.call_linear(p, x).view(B, T, self.num_heads, -1) for p in (self.q, self.k, self.v)
        )  # (B, T, nh, hs)
        if self.relative_bias is not None:
            mask = self.relative_scores(T, mask)
        dropout = self.dropout if self.training else 0.0
        causal = self.causal and mask is None and query is None
        if causal and not dropout and compiled.runs_attention(q, k, v):
            return products.call_linear(self.o, compiled.attention(q, k, v, rotation).view(B, T, d))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if query is not None:
            q = _at(q, query)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        y = y.transpose(1, 2)
        return products.call_linear(self.o, y.reshape(B, -1, d))

    def relative_scores(self, T: int, mask: Tensor | None) -> Tensor:
        """Return the relative bias as an additive mask (1 or B, nh, T, T); masked entries are -inf."""
        bias = self.relative_bias
        assert bias is not None
        position = torch.arange(T, device=bias.device)
        distance = position[:, None] - position[None, :]  # (T, T), query minus key
        span = bias.shape[1] - 1 if self.causal else bias.shape[1] // 2
        index = distance.clamp(0 if self.causal else -span, span) + (0 if self.causal else span)
        scores = bias[:, index][None]  # (1, nh, T, T)
        if self.causal:
            scores = scores.masked_fill(distance < 0, float("-inf"))
        return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ff)
        self.down = nn.Linear(config.ff, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return gelu_linear(products.call_linear(self.up, x), self.down)  # self.up(x) is (B, T, ff)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rotation: Tensor | None, mask: Tensor | None, query: Tensor | None = None
    ) -> Tensor:
        y = self.attn(self.norm1(x), rotation, mask, query)
        x = (x if query is None else _at(x, query)) + self.drop(y)
        return x + self.drop(self.mlp(self.norm2(x)))


def _at(x: Tensor, position: Tensor) -> Tensor:
    """Return the token at `position` (B,) of each row of x (B, T, ...), as (B, 1, ...)."""
    return x[torch.arange(len(x), device=x.device), position].unsqueeze(1)


def _padding_mask(T: int, lengths: Tensor) -> Tensor:
    """Return a mask (B, 1, 1, T) that is False for padding."""
    return (torch.arange(T, device=lengths.device) < lengths[:, None])[:, None, None, :]


def _check_shapes(ids: Tensor, targets: Tensor) -> None:
    if ids.shape != targets.shape:
        raise UsageError(
            f"the targets have the shape {tuple(targets.shape)}, but the ids {tuple(ids.shape)}: give one "
            "target per token, such as ids[:, :-1] and ids[:, 1:]"
        )


class GPT(nn.Module):
    """A GPT. `forward()` returns hidden states; `loss()`, `logits()` and `classify()` also apply the head."""

    rotation: Tensor | None
    # Methods besides `forward` for which FSDP must gather the parameters.
    entry_points = ("loss", "token_losses", "logits", "classify")

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.classes) if config.classes else None
        table = rotary_table(config) if config.position == "rope" else None
        self.register_buffer("rotation", table, persistent=False)
        self._init_weights(generator)

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator | None) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, 0.02, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, T, d) of ids (B, T).

        If rows are padded on the right, `lengths` (B,) is the number of tokens in each row without padding.
        """
        return self._hidden(ids, lengths)

    def _hidden(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self._trunk(self.tokens(ids), lengths)

    @property
    def computes_only_last_token(self) -> bool:
        """Whether the last block computes only the last token of each row.

        A classifier reads no other. The output projection and the MLP, 9/12 of the FLOPs of a block's matrix
        products, are then almost free in the last block.
        """
        attention = cast(Block, self.blocks[-1]).attn
        return bool(self.config.classes) and attention.relative_bias is None

    def _trunk(self, x: Tensor, lengths: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Return the hidden states (B, T, d) of token embeddings (B, T, d).

        lengths: tokens (B,) of each row without the padding on its right; None = no padding
        last_only: return only the hidden state (B, 1, d) of the last token of each row (see `lengths`)
        """
        T = x.shape[1]
        if self.config.context < T:
            raise UsageError(
                f"the input has {T} tokens, but the GPT's context length is {self.config.context}; "
                "shorten the input"
            )
        if self.positions is not None:
            x = x + self.positions.weight[:T]
        x = self.drop(x)
        rotation = self.rotation[:T] if self.rotation is not None else None
        mask = None
        if lengths is not None and not self.config.causal:  # causal attention never sees padding on the right
            mask = _padding_mask(T, lengths)
        *others, last = self.blocks
        for block in others:
            x = block(x, rotation, mask)
        if not last_only:
            return self.norm(last(x, rotation, mask))
        assert lengths is not None
        return self.norm(last(x, rotation, _padding_mask(T, lengths), lengths - 1))

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """Return the cross-entropy of predicting the next tokens `targets` (B, T) from ids (B, T).

        Targets of -100 are ignored.
        """
        self._require_head("a language model", classifier=False)
        _check_shapes(ids, targets)
        weight = self.tokens.weight
        own = compiled.on_plain_cpu(weight) and not products.has_hooks(self.tokens)
        tied = TiedGradient() if weight.requires_grad and own else None
        x = tied_embedding(ids, weight, tied) if tied else self.tokens(ids)
        hidden = self._trunk(x)
        total = cross_entropy_sum(hidden.flatten(0, 1), weight, targets.flatten(), tied)
        return total if reduction == "sum" else total / (targets >= 0).sum().clamp(min=1)

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each of the `targets` (B, T), without gradients; 0 for target -100."""
        self._require_head("a language model", classifier=False)
        _check_shapes(ids, targets)
        hidden = self._hidden(ids)
        losses = cross_entropy_each(hidden.flatten(0, 1), self.tokens.weight, targets.flatten())
        return losses.view(targets.shape)

    def logits(self, ids: Tensor) -> Tensor:
        """Return the next-token logits (B, T, V) of ids (B, T)."""
        self._require_head("a language model", classifier=False)
        return products.linear(self._hidden(ids), self.tokens.weight)

    def classify(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the class logits (B, classes) of ids (B, T), computed from the last token of each row.

        Rows are padded on the right; `lengths` (B,) is the number of tokens in each row without padding.
        """
        self._require_head("a classifier", classifier=True)
        assert self.head is not None
        if self.computes_only_last_token:
            last = self._trunk(self.tokens(ids), lengths, last_only=True)  # (B, 1, d)
        else:
            last = _at(self._hidden(ids, lengths), lengths - 1)
        return self.head(last.squeeze(1))

    def _require_head(self, kind: str, *, classifier: bool) -> None:
        if bool(self.config.classes) != classifier:
            raise UsageError(
                f"this GPT is not {kind}, because its config has classes={self.config.classes}; "
                "use classes=0 for a language model, and the number of classes for a classifier"
            )

    def save(self, folder: Path | str) -> None:
        """Write model.safetensors and config.json, which `GPT.load()` reads.

        If a method was applied to the model, use `oelm.save()` instead.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", {"model_type": "oelm-gpt", **dataclasses.asdict(self.config)})

    @classmethod
    def load(cls, folder: Path | str) -> GPT:
        """Return the GPT that `save()` wrote into `folder`."""
        model = cls.from_config(folder)
        path = Path(folder) / "model.safetensors"
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise OelmError(f"cannot load {path}: {error}") from None
        missing, unexpected = model.load_state_dict(state, strict=False)
        if missing or unexpected:
            raise OelmError(
                f"{folder}: the weights do not match the GPT of config.json (missing {missing[:3]}, "
                f"unexpected {unexpected[:3]}). If a method was applied to the model, use oelm.load."
            )
        return model

    @classmethod
    def from_config(cls, folder: Path | str) -> GPT:
        """Return a newly initialised GPT with the shape in `folder`/config.json, which `save()` wrote."""
        path = Path(folder) / "config.json"
        try:
            fields = read_json_object(path)
        except FileNotFoundError:
            raise OelmError(f"{folder} is not a saved GPT: it has no config.json") from None
        if fields.pop("model_type", None) != "oelm-gpt":
            raise OelmError(f"{path} is not the config of an oelm GPT: its model_type is not 'oelm-gpt'")
        try:
            config = GPTConfig(**fields)
        except (TypeError, UsageError) as error:
            raise OelmError(f"{path} is not a valid GPT config: {error}") from None
        # A damaged config.json could describe a GPT of many terabytes, so compare its shape with the size of
        # the weight files before memory is allocated. Each stored parameter takes at least one byte.
        stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        least = config.vocab_size * config.width + config.layers * config.width**2
        if least > stored:
            raise OelmError(
                f"{path} and the weight files (such as model.safetensors) do not match: a GPT of this shape "
                "has more parameters than the files have bytes. Restore the damaged file from a copy"
            )
        return cls(config)
