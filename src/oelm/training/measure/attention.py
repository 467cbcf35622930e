"""Attention statistics of the built-in GPT during training: entropy, logit scale, orthogonality of Q and K.

The statistics are computed from a few sequences. They are deterministic, so that a resumed run writes the
same metrics.jsonl as an uninterrupted run.
"""

from __future__ import annotations

import math
from typing import Any, cast

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
    seen: dict[str, Tensor] = {}
    attentions = [cast(Block, block).attn for block in model.blocks]
    hooks = [
        getattr(attn, part).register_forward_hook(_keep(seen, f"{layer}{part}"))
        for layer, attn in enumerate(attentions)
        for part in "qk"
    ]
    hooks += [
        attn.register_forward_hook(_keep_bias(seen, f"{layer}bias"))
        for layer, attn in enumerate(attentions)
        if attn.relative_bias is not None
    ]
    was_training = model.training
    model.eval()
    try:
        model(ids, lengths)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    orthogonality = _orthogonality(model)
    rows = []
    for layer, attn in enumerate(attentions):
        q, k = (seen[f"{layer}{part}"] for part in "qk")
        row = _layer(model, attn, q, k, seen.get(f"{layer}bias"), lengths)
        rows.append({"layer": layer, **row, **orthogonality.get(layer, {})})
    return rows


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


def _keep(seen: dict[str, Tensor], name: str) -> Any:
    def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
        seen[name] = output.float()

    return hook


def _keep_bias(seen: dict[str, Tensor], name: str) -> Any:
    def hook(attn: Attention, inputs: tuple[Tensor, ...], _output: Any) -> None:
        seen[name] = attn.relative_scores(inputs[0].shape[1], None).float()

    return hook


def _layer(
    model: GPT, attn: Attention, q: Tensor, k: Tensor, bias: Tensor | None, lengths: Tensor | None
) -> dict[str, Any]:
    B, T, _ = q.shape
    q, k = (x.view(B, T, attn.num_heads, -1) for x in (q, k))  # (B, T, nh, hs)
    if model.rotation is not None:
        q, k = rotate(q, model.rotation[:T]), rotate(k, model.rotation[:T])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    position = torch.arange(T, device=q.device)
    visible = torch.ones(B, 1, T, T, dtype=torch.bool, device=q.device)
    if attn.causal:
        visible &= position[None, :] <= position[:, None]
    counted = torch.ones(B, T, dtype=torch.bool, device=q.device)  # queries that are not padding
    if lengths is not None:
        counted = position[None, :] < lengths[:, None]
        visible &= counted[:, None, None, :]
    if bias is not None:
        scores = scores + bias.masked_fill(~visible, 0.0)
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
