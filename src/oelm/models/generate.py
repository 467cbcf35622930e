"""Generate tokens by sampling with temperature, top-k and top-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oelm.errors import UsageError
from oelm.models.gpt import GPT


@torch.inference_mode()
def generate(
    model: GPT,
    ids: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    stop_id: int | None = None,
) -> Tensor:
    """Return the prompt `ids` (T,) followed by up to `new_tokens` generated tokens.

    Temperature 0 takes the most likely token. Each token is predicted from the last `model.config.context`
    tokens. Generation stops after the token `stop_id`, if given.
    """
    if not len(ids):
        raise UsageError("the prompt is empty; it needs at least one token")
    if new_tokens < 0:
        raise UsageError(f"new_tokens must not be negative, got {new_tokens}")
    was_training = model.training
    model.eval()
    try:
        for _ in range(new_tokens):
            hidden = model(ids[None, -model.config.context :])  # (1, T, d)
            logits = hidden[0, -1] @ model.tokens.weight.T  # (V,), for the last token only
            token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            ids = torch.cat([ids, token.view(1)])
            if stop_id is not None and int(token) == stop_id:
                break
    finally:
        model.train(was_training)
    return ids


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return one token ID, sampled from logits (V,).

    Only the `top_k` most likely tokens are allowed (0 = all), and of these only the most likely ones whose
    probabilities sum to `top_p`.
    """
    if not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise UsageError(
            f"sampling needs a finite temperature >= 0, top_k >= 0 and 0 < top_p <= 1, "
            f"got temperature {temperature}, top_k {top_k} and top_p {top_p}"
        )
    if temperature == 0:
        return logits.argmax()
    logits = logits.float() / temperature
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # keep the token that makes the sum reach top_p
        probabilities[order[beyond]] = 0
    return torch.multinomial(probabilities, 1, generator=generator)[0]
