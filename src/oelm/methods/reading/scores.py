"""Record the attention scores of any module while it runs."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

#: The functions whose input counts as attention scores. logsumexp is included because models with attention
#: sinks (Granite) use it to rescale the output of attention.
_SOFTMAX = {
    *(F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax),
    *(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp),
}


#: Functions that return the largest element. Some modules (GPT-OSS) subtract the maximum from their scores.
_MAXIMUM = {torch.amax, Tensor.amax, torch.max, Tensor.max}


class ScoreRecorder(TorchFunctionMode):
    """A context manager that records the input of every softmax, the attention scores, in `scores`.

    The softmax gets a detached copy of its input. So a gradient of the module's output reaches only
    parameters that affect the output other than through the scores, such as those of v, and a gradient of the
    scores reaches only parameters that affect the scores, such as those of q and k.
    A maximum has no gradient: the softmax does not change if the maximum is subtracted from its input, but
    each score would depend on the token with the largest score, too.
    torch's fused attention functions, which hide the scores, are replaced by unfused code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SOFTMAX:
            scores, *rest = args if args else (kwargs.pop("input"),)
            if scores.dim() >= 3:
                dim = rest[0] if rest else kwargs.get("dim", -1)
                self.scores.append(scores if dim is None else scores.movedim(dim, -1))
                return func(scores.detach(), *rest, **kwargs)
        if func in _MAXIMUM and not any(isinstance(value, Tensor) for value in args[1:]):
            return func(*(a.detach() if isinstance(a, Tensor) else a for a in args), **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            return self._multi_head_attention(**given.arguments), None
        return func(*args, **kwargs)

    def _multi_head_attention(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """Return the output of torch's multi_head_attention_forward for inputs (T, B, d).

        Padding masks and extra keys are not supported.
        """
        if any(given[name] is not None for name in ("bias_k", "bias_v")) or given["add_zero_attn"]:
            raise NotImplementedError(
                "bias_k, bias_v and add_zero_attn of torch's attention are not supported"
            )
        packed = given["in_proj_weight"], given["in_proj_bias"]
        weights, biases = ((None,) * 3 if t is None else t.chunk(3) for t in packed)
        if given["use_separate_proj_weight"]:
            weights = [given[f"{part}_proj_weight"] for part in "qkv"]
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (given["num_heads"], -1)).movedim(0, 2)  # (B, H, T, head_dim)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        mask = given["attn_mask"]
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, given["num_heads"]))
        mask = ~mask if mask is not None and mask.dtype == torch.bool else mask
        output = self._attend(q, k, v, attn_mask=mask).movedim(2, 0).flatten(2)
        return F.linear(output, given["out_proj_weight"], given["out_proj_bias"])

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the output of torch's scaled_dot_product_attention without dropout; record its scores."""
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        self.scores.append(scores)
        return torch.softmax(scores.detach(), -1).nan_to_num() @ value
