"""Attention statistics of the built-in GPT during training: entropy, logit scale, orthogonality of Q and K.

The statistics are computed from a few sequences. They are deterministic, so that a resumed run writes the
same metrics.jsonl as an uninterrupted run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from oelm.methods.reading.find import qk_projections
from oelm.models.gpt import GPT, Attention, Block, rotate

MAX_ROWS = 4
MAX_TOKENS = 256


@torch.no_grad()
def attention_statistics(
    model: nn.Module, tensors: dict[str, Tensor], device: torch.device
) -> list[dict[str, Any]]:
    """Return the attention statistics of each layer for the first rows of a batch.

    The result is [] for models other than the built-in GPT.

    entropy: entropy in nats of the attention weights of a query, averaged over queries and heads
    entropy_heads: the same entropy for each head, averaged over queries
    logit_scale: standard deviation of the attention logits
    off_orthogonal_q, off_orthogonal_k: see `off_orthogonal()`; only for trainable projections
    """
    if not isinstance(model, GPT):
        return []
    ids = tensors["ids"][:MAX_ROWS, :MAX_TOKENS].to(device)
    lengths = None
    if "lengths" in tensors:
        lengths = tensors["lengths"][:MAX_ROWS].clamp(max=ids.shape[1]).to(device)
    layers = enumerate(run_attention(model, ids, lengths))
    rows = [{"layer": number, **_statistics(layer, lengths)} for number, layer in layers]
    orthogonality = _orthogonality(model)
    return [{**row, **orthogonality.get(row["layer"], {})} for row in rows]


class LayerAttention(NamedTuple):
    """What the attention of one layer computed for a batch."""

    attn: Attention
    q: Tensor  # (B, T, d), before the rotary rotation
    k: Tensor  # (B, T, d)
    rotation: Tensor | None  # table of the rotary rotation, as for `rotate()`
    bias: Tensor | None  # relative bias on the scores (1, nh, T, T); -inf for keys after a causal query

    def scores(self) -> Tensor:
        """Return the attention scores (B, nh, T, T) before the mask and the relative bias."""
        q, k = (x.unflatten(-1, (self.attn.num_heads, -1)) for x in (self.q, self.k))  # (B, T, nh, hs)
        if self.rotation is not None:
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
        return torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])


@torch.no_grad()
def run_attention(model: GPT, ids: Tensor, lengths: Tensor | None = None) -> list[LayerAttention]:
    """Run the model on `ids` (B, T); return the queries and keys of each layer."""
    seen: dict[nn.Module, Tensor] = {}
    attentions = [cast(Block, block).attn for block in model.blocks]

    def keep_output(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen[module] = output.float()

    def keep_bias(attn: Any, inputs: tuple[Tensor, ...], _output: Any) -> None:
        seen[attn] = attn.relative_scores(inputs[0].shape[1], None).float()

    hooks = [part.register_forward_hook(keep_output) for attn in attentions for part in (attn.q, attn.k)]
    # The bias is read in `forward()`, because only there a sharded model has all of its parameters.
    hooks += [attn.register_forward_hook(keep_bias) for attn in attentions if attn.relative_bias is not None]
    was_training = model.training
    model.eval()
    try:
        model(ids, lengths)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    rotation = None if model.rotation is None else model.rotation[: ids.shape[1]]
    return [LayerAttention(a, seen[a.q], seen[a.k], rotation, seen.get(a)) for a in attentions]


def off_orthogonal(heads: Tensor) -> float:
    """Return how far the rows of each head are from orthogonal: RMS of the cosines of all pairs of rows.

    The value is 0 for orthogonal rows. `heads` is a Q or K projection of shape (heads, head size, width).
    """
    unit = heads.double() / heads.double().norm(dim=-1, keepdim=True).clamp(min=1e-30)
    cosines = unit @ unit.mT  # (nh, hs, hs)
    size = cosines.shape[-1]
    if size < 2:
        return 0.0
    off = cosines - torch.diag_embed(cosines.diagonal(dim1=-2, dim2=-1))
    return float((off.square().sum() / (len(heads) * size * (size - 1))).sqrt())


def _statistics(layer: LayerAttention, lengths: Tensor | None) -> dict[str, Any]:
    scores, device = layer.scores(), layer.q.device
    B, T, _ = layer.q.shape
    position = torch.arange(T, device=device)
    visible = torch.ones(B, 1, T, T, dtype=torch.bool, device=device)
    if layer.attn.causal:
        visible &= position[None, :] <= position[:, None]
    counted = torch.ones(B, T, dtype=torch.bool, device=device)  # queries that are not padding
    if lengths is not None:
        counted = position[None, :] < lengths[:, None]
        visible &= counted[:, None, None, :]
    if layer.bias is not None:
        scores = scores + layer.bias.masked_fill(~visible, 0.0)
    shown = scores[(visible & counted[:, None, :, None]).expand_as(scores)]
    p = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)  # (B, nh, T)
    weight = counted[:, None, :].float()
    heads = (entropy * weight).sum((0, 2)) / weight.sum((0, 2))
    return {
        "entropy": _rounded(heads.mean()),
        "entropy_heads": [_rounded(h) for h in heads],
        "logit_scale": _rounded(shown.std()),
    }


def _orthogonality(model: GPT) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for projection in qk_projections(model):
        if projection.weight.parameter.requires_grad:
            layer = found.setdefault(projection.place.layer, {})
            layer[f"off_orthogonal_{projection.role}"] = _rounded(off_orthogonal(projection.heads()))
    return found


def _rounded(value: Tensor | float) -> float:
    """Return `value` rounded to six significant digits."""
    return float(f"{float(value):.6g}")
