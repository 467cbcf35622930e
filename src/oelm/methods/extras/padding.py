"""Padding on the left must not reach the text through a convolution: before a text there is nothing.

An attention is given the mask of its batch; the projections inside it are not. They are told here, for as
long as the attention works, so that nothing is left over for another batch and a recomputation sees it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from oelm.methods.extras.projection import ExtendedProjection

_MASK = "attention_mask"


def watch_padding(attention: nn.Module) -> None:
    """From now on, tell this attention's convolutions where there is padding, if it is ever told itself."""
    if _MASK in _arguments(type(attention).forward):
        attention.register_forward_pre_hook(_tell, with_kwargs=True)
        attention.register_forward_hook(_forget, always_call=True)


def _tell(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = dict(zip(_arguments(type(attention).forward), args, strict=False)) | kwargs
    _set(attention, real_tokens(given.get(_MASK)))


def _forget(attention: nn.Module, *_: Any) -> None:
    _set(attention, None)


def _set(attention: nn.Module, real: Tensor | None) -> None:
    for module in attention.modules():
        if isinstance(module, ExtendedProjection):
            module.real_tokens = real


@cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Of a class's forward pass, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


def real_tokens(mask: Any) -> Tensor | None:
    """(B, T), True where there is a token, of a mask per token or per pair; None if it does not say.

    Of pairs, the diagonal: every token sees itself, padding is seen by nobody.
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.dim() == 2:
        return mask != 0
    if mask.dim() != 4 or mask.shape[-1] != mask.shape[-2]:
        return None
    own = mask[:, 0].diagonal(dim1=-2, dim2=-1)
    return own > torch.finfo(own.dtype).min / 2 if own.is_floating_point() else own != 0
