"""The study's GPT on one screen: one trunk, an LM head tied to the embedding or a classification head.

Pre-LN blocks with a final LN, exact GELU, no bias in Q/K/V/O, biases in the MLP, N(0, 0.02) weights.
Learned positions as in the study; rotary positions (RoFormer, Su et al. 2021) as an option for every arm.
Shapes in the comments: B rows, T tokens, d width, nh heads, hs head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oelm.errors import OelmError, UsageError, unknown_name
from oelm.files.atomic import write_json
from oelm.files.read import read_json_object
from oelm.models.loss import cross_entropy_sum
from oelm.models.memory_saving import Tie, gelu_linear, saves_memory, tied_embedding
from oelm.models.sizes import SIZES


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. `classes` > 0 replaces the tied LM head by Linear(width, classes)."""

    vocab_size: int = 50257
    context: int = 512
    width: int = 512
    layers: int = 6
    heads: int = 8
    ff: int = 2048
    dropout: float = 0.0
    position: Literal["learned", "rope"] = "learned"
    causal: bool = True
    classes: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "width", "layers", "heads", "ff"):
            if getattr(self, name) < 1:
                raise UsageError(f"GPT {name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise UsageError(f"GPT width {self.width} does not divide into {self.heads} heads")
        if self.position not in ("learned", "rope"):
            raise unknown_name("position", self.position, ["learned", "rope"])
        if self.position == "rope" and (self.width // self.heads) % 2:
            raise UsageError(f"rotary positions need an even head size, not {self.width // self.heads}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must be in [0, 1), not {self.dropout}")
        if self.classes < 0:
            raise UsageError(f"classes must be 0 (language model) or more, not {self.classes}")
        if not self.classes and not self.causal:
            raise UsageError("a language model is causal; causal=False needs classes > 0")


def gpt_config(size: str, **rest: object) -> GPTConfig:
    """The GPTConfig of a named size: `gpt_config("mini", vocab_size=1024, context=128)`."""
    if size not in SIZES:
        raise unknown_name("GPT size", size, SIZES)
    return GPTConfig(**{**SIZES[size], **rest})  # type: ignore[arg-type]


class Attention(nn.Module):
    """Multi-head attention with separate q, k, v, o, so that q and k can be frozen for real."""

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
        """A trained bias per head and distance (T5, Raffel et al. 2020); distances past `span` share one."""
        size = span + 1 if self.causal else 2 * span + 1
        self.relative_bias = nn.Parameter(self.q.weight.new_zeros(self.num_heads, size))

    def forward(self, x: Tensor, rotation: Tensor | None, mask: Tensor | None) -> Tensor:
        B, T, d = x.shape
        q, k, v = (p(x).view(B, T, self.num_heads, -1) for p in (self.q, self.k, self.v))  # (B, T, nh, hs)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, nh, T, hs)
        if self.relative_bias is not None:
            mask = self._bias(T, mask)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )
        return self.o(y.transpose(1, 2).reshape(B, T, d))

    def _bias(self, T: int, mask: Tensor | None) -> Tensor:
        assert self.relative_bias is not None
        bias = self.relative_bias
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
        x = self.up(x)
        return gelu_linear(x, self.down) if saves_memory(x) else self.down(F.gelu(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Tensor | None, mask: Tensor | None) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x), rotation, mask))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """One trunk, two heads. `forward` gives the hidden states; `loss`, `logits` and `classify` the heads."""

    rotation: Tensor | None
    entry_points = (
        "loss",
        "logits",
        "classify",
    )  # called from outside like `forward`, and never by each other

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.width, config.classes) if config.classes else None
        table = rotation_table(config) if config.position == "rope" else None
        self.register_buffer("rotation", table, persistent=False)
        self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, 0.02, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """ids (B, T) -> hidden states (B, T, d). `lengths` (B,) marks right padding."""
        return self._hidden(ids, lengths)

    def _hidden(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self._trunk(self.tokens(ids), lengths)

    def _trunk(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        T = x.shape[1]
        if self.config.context < T:
            raise UsageError(f"{T} tokens do not fit the context of {self.config.context}")
        if self.positions is not None:
            x = x + self.positions.weight[:T]
        x = self.drop(x)
        rotation = self.rotation[:T] if self.rotation is not None else None
        mask = None
        if lengths is not None and not self.config.causal:  # causal rows never see their own right padding
            mask = (torch.arange(T, device=x.device) < lengths[:, None])[:, None, None, :]  # (B, 1, 1, T)
        for block in self.blocks:
            x = block(x, rotation, mask)
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """Cross-entropy of the next token; targets (B, T), IGNORE (-100) where they do not count."""
        self._must_be("a language model", classes=False)
        weight = self.tokens.weight
        tie = Tie() if weight.requires_grad and saves_memory(weight) else None
        x = tied_embedding(ids, weight, tie) if tie else self.tokens(ids)
        hidden = self._trunk(x)
        total = cross_entropy_sum(hidden.flatten(0, 1), weight, targets.flatten(), tie)
        if reduction == "sum":
            return total
        return total / (targets >= 0).sum().clamp(min=1)

    def logits(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> next-token logits (B, T, V)."""
        self._must_be("a language model", classes=False)
        return F.linear(self._hidden(ids), self.tokens.weight)

    def classify(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """ids (B, T) right-padded, lengths (B,) -> (B, classes) from each row's last valid token."""
        self._must_be("a classifier", classes=True)
        assert self.head is not None
        hidden = self._hidden(ids, lengths)
        last = hidden[torch.arange(len(ids), device=ids.device), lengths - 1]  # (B, d)
        return self.head(last)

    def _must_be(self, what: str, *, classes: bool) -> None:
        if bool(self.config.classes) != classes:
            raise UsageError(f"this GPT is not {what}: its config has classes={self.config.classes}")

    def save(self, folder: Path | str) -> None:
        """model.safetensors and config.json, loadable by `GPT.load` (or `oelm.load` after `oelm.apply`)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", {"model_type": "oelm-gpt", **dataclasses.asdict(self.config)})

    @classmethod
    def load(cls, folder: Path | str) -> GPT:
        model = cls.from_config(folder)
        path = Path(folder) / "model.safetensors"
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise OelmError(f"{path} does not load: {error}") from None
        missing, unexpected = model.load_state_dict(state, strict=False)
        if missing or unexpected:
            raise OelmError(
                f"{folder}: the weights do not fit the plain GPT of config.json (missing {missing[:3]}, "
                f"unexpected {unexpected[:3]}). A model saved with a method's extras loads with oelm.load."
            )
        return model

    @classmethod
    def from_config(cls, folder: Path | str) -> GPT:
        """A freshly drawn GPT of the shape that a saved folder describes."""
        path = Path(folder) / "config.json"
        try:
            fields = read_json_object(path)
        except FileNotFoundError:
            raise OelmError(f"{folder} holds no config.json: not a saved GPT") from None
        if fields.pop("model_type", None) != "oelm-gpt":
            raise OelmError(f"{path} does not describe an oelm GPT (model_type is not 'oelm-gpt')")
        try:
            return cls(GPTConfig(**fields))
        except (TypeError, UsageError) as error:
            raise OelmError(f"{path} describes no GPT: {error}") from None


def rotation_table(config: GPTConfig) -> Tensor:
    """(context, 2, hs): cosines, and sines with the sign of the half they multiply."""
    half = config.width // config.heads // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.context, dtype=torch.float64)[:, None] * frequency  # (context, hs / 2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1).float()


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: x (B, T, nh, hs) turned by its position's angles, rotation (T, 2, hs)."""
    cos, sin = rotation[:, 0, None, :].to(x.dtype), rotation[:, 1, None, :].to(x.dtype)  # (T, 1, hs)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
