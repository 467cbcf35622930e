"""Compute the last layer of an encoder classifier for the first token only.

BERT and similar models classify from the final hidden state of the first token. So in the last layer, the
query projection, the output projection and the MLP are needed only for this token; they are 10/12 of the
FLOPs of the layer's matrix products. Keys and values are still computed for all tokens. Logits and gradients
do not change.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

# Hugging Face model types whose classifiers read hidden[:, 0] and whose layers are post-LN, as in BERT.
FAMILIES = ("bert", "roberta", "xlm-roberta", "electra", "camembert")


def compute_only_first_token(model: nn.Module) -> bool:
    """Make the last layer of a Hugging Face sequence classifier compute only the first token.

    Return False, without a change, for unsupported models. Only the `forward` of this layer is replaced; the
    names, shapes and values of the weights stay the same.
    """
    layer = _last_layer(model)
    if layer is None:
        return False
    layer.forward = MethodType(_first_token_forward, layer)
    return True


def computes_only_first_token(layer: nn.Module) -> bool:
    """Return whether `compute_only_first_token()` has patched this layer."""
    return getattr(layer.forward, "__func__", None) is _first_token_forward


def _last_layer(model: nn.Module) -> nn.Module | None:
    config = getattr(model, "config", None)
    if not type(model).__name__.endswith("ForSequenceClassification") or config is None:
        return None
    if config.model_type not in FAMILIES or config.is_decoder or config._attn_implementation != "sdpa":
        return None
    trunk: Any = getattr(model, str(model.base_model_prefix))
    return trunk.encoder.layer[-1]


def _first_token_forward(
    layer: Any, hidden: Tensor, mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Return the layer's output (B, 1, d) for the first token of `hidden` (B, T, d)."""
    attention = layer.attention.self
    first = hidden[:, :1]
    # q (B, nh, 1, hs), k and v (B, nh, T, hs)
    q, k, v = (
        project(x).unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2)
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
