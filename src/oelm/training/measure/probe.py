"""Analyse the queries and keys of a trained GPT.

constant_share()         how much of q and k is the same for all tokens, so that a bias could learn it
attention_by_distance()  how much attention a head pays to the token that is d positions before the query
truncation()             how the loss grows if the learned change of W_Q and W_K is reduced to a low rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from oelm.models.gpt import GPT, Attention, Block
from oelm.training.measure.attention import run_attention

Matrices = dict[tuple[int, str], Tensor]  # (layer, "q" or "k") -> weight (rows, d_in)
ROLES = ("q", "k")


@torch.no_grad()
def constant_share(model: GPT, ids: Tensor) -> list[dict[str, float]]:
    """Return, for each layer, how much of q and of k is the same for all tokens, as {"q": ..., "k": ...}.

    The value is |mean(q)|^2 / mean(|q|^2), with means over all tokens of `ids` (B, T) and q before the rotary
    rotation: 0 if the mean of q is zero, 1 if q is the same for every token.
    """
    shares = []
    for layer in run_attention(model, ids):
        row = {}
        for role, x in zip(ROLES, (layer.q, layer.k), strict=True):
            heads = x.flatten(0, 1).unflatten(-1, (layer.attn.num_heads, -1)).double()  # (B T, nh, hs)
            row[role] = float(heads.mean(0).square().sum() / heads.square().sum((1, 2)).mean())
        shares.append(row)
    return shares


@torch.no_grad()
def attention_by_distance(model: GPT, ids: Tensor, distances: int) -> list[Tensor]:
    """Return, for each layer, the mean attention weights (heads, distances).

    Column d is the weight on the token d positions before the query (0 = the query itself). Only queries with
    at least `distances` visible tokens count, so that all columns are means over the same queries.
    """
    T = ids.shape[1]
    if not 1 <= distances <= T:
        raise ValueError(
            f"distances must be between 1 and {T}, the number of tokens per row, not {distances}"
        )
    found = []
    for layer in run_attention(model, ids):
        scores = layer.scores() if layer.bias is None else layer.scores() + layer.bias
        hidden = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean(0)  # (nh, T, T)
        queries = torch.arange(distances - 1, T, device=weights.device)
        back = [weights[:, queries, queries - d].mean(1) for d in range(distances)]
        found.append(torch.stack(back, dim=1))
    return found


def truncation(
    model: GPT,
    initial: GPT,
    loss: Callable[[], float],
    ranks: Sequence[int],
    layers: Sequence[int] | None = None,
) -> dict[int, float]:
    """Return {rank: loss}, where the learned change of W_Q and W_K is reduced to each of `ranks`.

    A weight W becomes W_0 plus the best approximation of W - W_0 with that rank (by singular values). Rank 0
    undoes everything that W has learned.

    initial: the same model with the same method before its first training step, whose weights are W_0
    loss: a function that returns the loss of `model`
    layers: the layers whose W_Q and W_K are changed; None = all
    """
    chosen = range(len(model.blocks)) if layers is None else layers
    learned, before = _weights(model), _weights(initial)
    changes = {
        key: torch.linalg.svd((w - before[key]).double(), full_matrices=False)
        for key, w in learned.items()
        if key[0] in chosen
    }
    losses = {}
    for rank in ranks:
        cut: Matrices = {}
        for key, (u, s, v) in changes.items():
            change = (u[:, :rank] * s[:rank]) @ v[:rank]
            cut[key] = before[key] + change.to(before[key].dtype)
        with _replaced(model, cut):
            losses[rank] = loss()
    return losses


def _attentions(model: GPT) -> list[Attention]:
    return [cast(Block, block).attn for block in model.blocks]


def _projection(attention: Attention, role: str) -> nn.Module:
    return cast(nn.Module, getattr(attention, role))


def _weights(model: GPT) -> Matrices:
    return {
        (layer, role): cast(Tensor, _projection(attention, role).weight).detach().clone()
        for layer, attention in enumerate(_attentions(model))
        for role in ROLES
    }


@contextmanager
def _replaced(model: GPT, weights: Matrices) -> Iterator[None]:
    """Replace matrices W_Q and W_K of `model` by `weights` in the `with` block, and restore them after it."""
    attentions = _attentions(model)
    parameters = {key: cast(Tensor, _projection(attentions[key[0]], key[1]).weight) for key in weights}
    kept = {key: parameter.data for key, parameter in parameters.items()}
    try:
        for key, parameter in parameters.items():
            parameter.data = weights[key]
        yield
    finally:
        for key, parameter in parameters.items():
            parameter.data = kept[key]
