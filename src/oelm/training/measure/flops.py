"""Count the FLOPs of a training step, and the FLOPs that a method saves.

For a weight matrix W with |W| elements and n tokens that pass through it (a multiply-add counts as two):

    forward          y = x W^T        2 n |W|
    input gradient   dx = dy W        2 n |W|    always, because layers below W are trainable
    weight gradient  dW = dy^T x      2 n |W|    only if W is trainable; freezing W saves this

Attention of T queries over S keys with width d needs 4 T S d FLOPs in the forward pass and twice as many in
the backward pass; half of that if it is causal. A low-rank adapter is merged into its matrix once per batch,
so its factors A and B need only the FLOPs of their gradients, 4 n (|A| + |B|). An adapter that computes the
full weight gradient needs 2 n |W| instead. An output head that is tied to the embedding counts as a matrix;
an embedding lookup needs no FLOPs. Every matrix counts once per token. This is too little for layers that are
used several times (ALBERT), and too much for mixtures of experts. Norms, activations, softmax and the
optimizer are limited by memory bandwidth and are not counted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from oelm.compiled.products import product
from oelm.errors import OelmError
from oelm.methods.extras.extended import ExtendedProjection
from oelm.methods.reading.find import qk_projections
from oelm.models.first_token import computes_only_first_token
from oelm.models.gpt import GPT

Stream = Literal["source", "target", "row"]

# Name prefixes of layers that process one vector per row of a batch, instead of one vector per token.
_PER_ROW = ("head.", "classifier.", "classification_head.", "score.", "pooler.", "pre_classifier.")
_CROSS = ("encoder_attn", "EncDecAttention", "crossattention")
_KEYS_VALUES = ("k", "v", "k_proj", "v_proj", "key", "value")


@dataclass(frozen=True)
class Product:
    """A weight matrix with `size` elements, and which vectors are multiplied by it (`stream`).

    `stream` is "source" (all input tokens), "target" (all decoder tokens) or "row" (one vector per row).
    """

    name: str
    size: int
    trains: bool  # whether the gradient of the matrix is computed
    stream: Stream = "source"
    merged: bool = False  # whether the matrix is a factor of a low-rank adapter, merged into another matrix


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one training step, by kind of work."""

    forward: float
    input_gradient: float
    weight_gradient: float
    attention: float  # products of queries, keys and values, forward and backward

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient + self.attention


@dataclass(frozen=True)
class FlopModel:
    """Computes the FLOPs of a training step of one model from the shape of the batch."""

    products: tuple[Product, ...]
    # One (kind, width, causal) per attention layer. Kinds: "self" (self-attention of the inputs), "decoder"
    # (self-attention of the decoder), "cross" (from decoder to encoder), and "one" (self-attention in which
    # only one token of each row is a query: the one that a classifier reads).
    attention: tuple[tuple[str, int, bool], ...]

    def step(self, rows: int, length: int, target_length: int = 0) -> Flops:
        """Return the FLOPs of one forward and backward pass of `rows` rows with `length` tokens each.

        `length` includes padding. `target_length` is the number of tokens of a decoder row; 0 if the model
        has no decoder.
        """
        tokens = {"source": rows * length, "target": rows * target_length, "row": rows}
        forward = sum(2.0 * p.size * tokens[p.stream] for p in self.products if not p.merged)
        weights = sum((2.0 + 2.0 * p.merged) * p.size * tokens[p.stream] for p in self.products if p.trains)
        pairs = {
            "self": length**2,
            "one": length,
            "decoder": target_length**2,
            "cross": target_length * length,
        }
        scores = sum(
            4.0 * rows * pairs[kind] * d * (0.5 if causal else 1) for kind, d, causal in self.attention
        )
        return Flops(forward, forward, weights, 3 * scores)

    def all_trained(self) -> FlopModel:
        """Return the FLOP model for the same architecture with all parameters trainable."""
        return replace(self, products=tuple(replace(p, trains=True) for p in self.products))

    def saving(self, rows: int, length: int) -> float:
        """Return the fraction of FLOPs that freezing saves in a step of `rows` rows of `length` tokens."""
        return 1.0 - self.step(rows, length).total / self.all_trained().step(rows, length).total


def flop_model(model: nn.Module) -> FlopModel:
    """Return the FLOP model of a built-in GPT or transformers model, for its currently frozen parameters."""
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    one_token = _one_token_products(model)
    two_stacks = bool(getattr(_config(model), "is_encoder_decoder", False))
    products = []
    full_gradient = {
        name
        for name, m in model.named_modules()
        if isinstance(m, ExtendedProjection) and m.needs_full_weight_gradient
    }
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        trains = parameter.requires_grad
        if owner in full_gradient:
            if own in ("lowrank_a", "lowrank_b"):
                continue
            trains = trains or own == "weight"
        if parameter.dim() >= 2 and id(parameter) not in embeddings and "relative_bias" not in name:
            stream = _stream(name, two_stacks)
            if one_token and re.match(one_token, name):
                stream = "row"
            merged = name.endswith((".lowrank_a", ".lowrank_b"))
            products.append(Product(name, parameter.numel(), trains, stream, merged))
    head = _tied_head(model, embeddings)
    if head is not None:
        stream = "target" if two_stacks else "source"
        products.append(Product("tied head", head.numel(), head.requires_grad, stream))
    return FlopModel(tuple(products), tuple(_attentions(model)))


def gemm_peak(device: torch.device) -> float:
    """Return the measured peak FLOP/s of a large fp32 matmul on `device`; this takes about 0.3 seconds."""
    size = 4096 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device)
    best, deadline = float("inf"), time.perf_counter() + 0.3
    for _ in range(50):
        _synchronise(device)
        start = time.perf_counter()
        product(a, a)  # by torch or our own code, whichever is faster
        _synchronise(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= deadline:
            break
    return 2.0 * size**3 / best


def _synchronise(device: torch.device) -> None:
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


def _one_token_products(model: nn.Module) -> str:
    """Return a pattern for the names of the matrices that process one token of each row in the last layer.

    It is "" if the last layer processes all tokens.
    """
    if isinstance(model, GPT):
        return rf"blocks\.{len(model.blocks) - 1}\.(attn\.o|mlp)\." if model.computes_only_last_token else ""
    layer = _first_token_layer(model)
    return rf"{re.escape(layer)}(?!.*\.(key|value)\.)" if layer else ""


def _first_token_layer(model: nn.Module) -> str:
    """Return the name prefix of the layer that computes only the first token of a row; "" if none does."""
    names = (name for name, module in model.named_modules() if computes_only_first_token(module))
    return next((f"{name}." for name in names), "")


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def _tied_head(model: nn.Module, embeddings: dict[int, nn.Embedding]) -> torch.Tensor | None:
    """Return the embedding weight that is also the output head (tied); None if the head is not tied."""
    tokens = getattr(model, "tokens", None)
    if isinstance(tokens, nn.Embedding):  # the built-in GPT, whose head is tied unless it is a classifier
        return tokens.weight if getattr(model, "head", None) is None else None
    output = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(output, "weight", None)
    return weight if weight is not None and id(weight) in embeddings else None


def _attentions(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    config = _config(model)
    if isinstance(model, GPT):
        yield from [("self", config.width, config.causal)] * (config.layers - model.computes_only_last_token)
        yield from [("one", config.width, False)] * model.computes_only_last_token
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
    if _first_token_layer(model):
        kinds[-1] = "one"
    yield from [(kind, width, _is_causal(model)) for kind in kinds]


def _is_causal(model: nn.Module) -> bool:
    """Return whether attention is causal.

    The attribute `is_causal` of the attention modules says so; without it, the class name and the config do.
    """
    said = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
    named = any(part in type(model).__name__ for part in ("CausalLM", "LMHead", "GPT", "Bloom"))
    return any(said) if said else named or bool(getattr(_config(model), "is_decoder", False))


def _query_width(model: nn.Module) -> int:
    """Return the output size of a query projection (heads x head size); 0 if no attention is recognised."""
    try:
        return next((p.num_heads * p.head_dim for p in qk_projections(model) if p.role == "q"), 0)
    except OelmError:
        return 0
