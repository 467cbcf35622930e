"""The last layer of an encoder that classifies, for the one token that its head reads.

BERT and its kin classify from the first token's final state. Every other final state is computed, kept,
differentiated and thrown away: the query, the attention's output and the MLP of one layer over all tokens,
10 of the 12 d^2 of its matrices, a seventh of a six-layer network. Here the last layer still takes keys and
values from every token, and does the rest for the first alone. Logits and gradients are the same.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

# Whose sequence classifiers read hidden[:, 0] of post-LN layers built like BERT's.
FAMILIES = ("bert", "roberta", "xlm-roberta", "electra", "camembert")


def compute_only_first_token(model: nn.Module) -> bool:
    """Let a transformers sequence classifier compute what its head reads; False when it is another kind.

    Only this object is changed, not what it saves: names, shapes and values of its weights stay.
    """
    layer = last_encoder_layer(model)
    if layer is None:
        return False
    layer.forward = MethodType(_first_token, layer)
    return True


def computes_only_first_token(layer: nn.Module) -> bool:
    """Whether `compute_only_first_token` changed this layer."""
    return getattr(layer.forward, "__func__", None) is _first_token


def last_encoder_layer(model: nn.Module) -> nn.Module | None:
    config = getattr(model, "config", None)
    if not type(model).__name__.endswith("ForSequenceClassification") or config is None:
        return None
    if config.model_type not in FAMILIES or config.is_decoder or config._attn_implementation != "sdpa":
        return None
    trunk: Any = getattr(model, str(model.base_model_prefix))
    return trunk.encoder.layer[-1]


def _first_token(layer: Any, hidden: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The layer's own modules in its own order: hidden (B, T, d) -> (B, 1, d)."""
    attention = layer.attention.self
    first = hidden[:, :1]
    q, k, v = (
        project(x).unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2)  # (B, nh, 1 | T, hs)
        for project, x in ((attention.query, first), (attention.key, hidden), (attention.value, hidden))
    )
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if mask is None else mask[:, :, :1],
        dropout_p=attention.dropout.p if layer.training else 0.0,
        scale=attention.scaling,
    )
    y = layer.attention.output(y.transpose(1, 2).flatten(2), first)
    return layer.feed_forward_chunk(y)
