"""How many floating-point operations a training step must do, and how many a method really skips.

For every weight matrix W of the network and n tokens that pass through it (a multiply-add counts as two):

    forward          y = x W^T        2 n |W|
    input gradient   dx = dy W        2 n |W|    always: what lies below trains
    weight gradient  dW = dy^T x      2 n |W|    only where W trains: this is what freezing saves

Attention of T queries over S keys, width d: scores and mixture are 4 T S d forward and twice that backward,
halved when causal. The factors of a residue are merged into their matrix once per batch and cost nothing per
token but their own gradients, two thin products each: 4 n (|A| + |B|); where they are not thin (see
`rank_is_small`), the weight gradient of W instead. A head tied to the embedding counts as a matrix of its
own over all tokens; looking an embedding up counts nothing. Every matrix counts once for every token: too
little for a layer that is used several times (ALBERT), too much for one of many experts. Norms, activations,
softmax and the optimizer are left out: they are memory traffic, not matrix products, and the share of the
GEMM peak is about matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from oelm.errors import OelmError
from oelm.methods.extras.extended import ExtendedProjection
from oelm.methods.reading.find import qk_projections
from oelm.models.first_token import computes_only_first_token

Stream = Literal["source", "target", "row"]

# Layers that see one vector per row, whatever its length.
_PER_ROW = ("head.", "classifier.", "classification_head.", "score.", "pooler.", "pre_classifier.")
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention")
_KEYS_VALUES = ("k", "v", "k_proj", "v_proj", "key", "value")


@dataclass(frozen=True)
class Product:
    """The matrix products of one weight: `size` elements, over the tokens of its stream."""

    name: str
    size: int
    trains: bool  # or its gradient is made all the same
    stream: Stream = "source"
    merged: bool = False  # a factor of a residue


@dataclass(frozen=True)
class Flops:
    """One training step, by where the work goes."""

    forward: float
    input_gradient: float
    weight_gradient: float
    attention: float  # forward and backward

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient + self.attention


@dataclass(frozen=True)
class FlopModel:
    """What one step of a given network costs, as a function of the batch's shape."""

    products: tuple[Product, ...]
    # ("self" | "first" (one query, see models.first_token) | "decoder" | "cross", width, causal) per layer
    attention: tuple[tuple[str, int, bool], ...]

    def step(self, rows: int, length: int, target_length: int = 0) -> Flops:
        """The cost of forward and backward over `rows` rows of `length` (padded) tokens."""
        tokens = {"source": rows * length, "target": rows * target_length, "row": rows}
        forward = sum(2.0 * p.size * tokens[p.stream] for p in self.products if not p.merged)
        weights = sum((2.0 + 2.0 * p.merged) * p.size * tokens[p.stream] for p in self.products if p.trains)
        pairs = {
            "self": length**2,
            "first": length,
            "decoder": target_length**2,
            "cross": target_length * length,
        }
        scores = sum(
            4.0 * rows * pairs[kind] * d * (0.5 if causal else 1) for kind, d, causal in self.attention
        )
        return Flops(forward, forward, weights, 3 * scores)

    def all_trained(self) -> FlopModel:
        """The same network with nothing frozen: what a saving is measured against."""
        return replace(self, products=tuple(replace(p, trains=True) for p in self.products))

    def saving(self, rows: int, length: int, target_length: int = 0) -> float:
        """The share of a step's FLOPs that freezing saves."""
        full = self.all_trained().step(rows, length, target_length).total
        return 1.0 - self.step(rows, length, target_length).total / full


def flop_model(model: nn.Module) -> FlopModel:
    """Read the FLOP model off a network as it stands: our GPT or a transformers model, any method applied."""
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    read = _read_layer(model)
    two_stacks = bool(getattr(_config(model), "is_encoder_decoder", False))
    products = []
    whole = {
        name
        for name, m in model.named_modules()
        if isinstance(m, ExtendedProjection) and m.needs_full_weight_gradient
    }
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        trains = parameter.requires_grad
        if owner in whole:
            if own in ("lowrank_a", "lowrank_b"):
                continue
            trains = trains or own == "weight"
        if parameter.dim() >= 2 and id(parameter) not in embeddings and "relative_bias" not in name:
            stream = _stream(name, two_stacks)
            if read and name.startswith(read) and not _is_key_or_value(name):
                stream = "row"
            merged = name.endswith((".lowrank_a", ".lowrank_b"))
            products.append(Product(name, parameter.numel(), trains, stream, merged))
    head = _tied_head(model, embeddings)
    if head is not None:
        stream = "target" if two_stacks else "source"
        products.append(Product("tied head", head.numel(), head.requires_grad, stream))
    return FlopModel(tuple(products), tuple(_attentions(model)))


def gemm_peak(device: torch.device, dtype: torch.dtype = torch.float32, seconds: float = 0.3) -> float:
    """FLOP/s of the largest plain matrix product this machine does now, in about `seconds`."""
    size = 4096 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=dtype)
    best, deadline = float("inf"), time.perf_counter() + seconds
    for _ in range(50):
        _wait(device)
        start = time.perf_counter()
        a @ a
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= deadline:
            break
    return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stream(name: str, two_stacks: bool) -> Stream:
    if any(name.startswith(part) or f".{part}" in name for part in _PER_ROW) and "lm_head" not in name:
        return "row"
    if two_stacks and ("decoder." in name or "lm_head" in name):
        crosses = any(part in name for part in _CROSS) and _is_key_or_value(name)
        return "source" if crosses else "target"
    return "source"


def _is_key_or_value(name: str) -> bool:
    return any(part in _KEYS_VALUES for part in name.split("."))


def _read_layer(model: nn.Module) -> str:
    """The name of the layer that works for the first token alone, as a prefix; "" without one."""
    return next(
        (f"{name}." for name, module in model.named_modules() if computes_only_first_token(module)), ""
    )


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _tied_head(model: nn.Module, embeddings: dict[int, nn.Embedding]) -> torch.Tensor | None:
    """The embedding that also serves as the output matrix, if there is one."""
    tokens = getattr(model, "tokens", None)
    if isinstance(tokens, nn.Embedding):  # our GPT: tied unless it classifies
        return tokens.weight if getattr(model, "head", None) is None else None
    output = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(output, "weight", None)
    return weight if weight is not None and id(weight) in embeddings else None


def _attentions(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    config = _config(model)
    if hasattr(model, "blocks") and hasattr(config, "causal"):  # our GPT
        yield from [("self", config.width, config.causal)] * config.layers
        return
    if config is None:
        return
    if getattr(config, "is_encoder_decoder", False):
        width = config.d_model if not hasattr(config, "d_kv") else config.d_kv * config.num_heads
        decoders = getattr(config, "num_decoder_layers", None) or config.decoder_layers
        encoders = getattr(config, "num_layers", None) or config.encoder_layers
        yield from [("self", width, False)] * encoders
        yield from [("decoder", width, True), ("cross", width, False)] * decoders
        return
    layers = getattr(config, "num_hidden_layers", 0)
    width = _query_width(model) or getattr(config, "hidden_size", 0)
    kinds = ["self"] * layers
    if _read_layer(model):
        kinds[-1] = "first"
    yield from [(kind, width, _is_causal(model)) for kind in kinds]


def _is_causal(model: nn.Module) -> bool:
    """As its attentions say; where none does, as its name does."""
    said = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    named = any(part in type(model).__name__ for part in ("CausalLM", "LMHead", "GPT", "Bloom"))
    return any(said) if said else named or bool(getattr(_config(model), "is_decoder", False))


def _query_width(model: nn.Module) -> int:
    """Rows of a query projection: heads times their size, as configs do not always tell; 0 if unread."""
    try:
        return next((p.num_heads * p.head_dim for p in qk_projections(model) if p.role == "q"), 0)
    except OelmError:
        return 0
