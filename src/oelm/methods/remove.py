"""`oelm.remove` undoes `oelm.apply`; `oelm.disabled` turns the trainable extras off inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oelm.errors import OelmError
from oelm.methods.extras.extended import ExtendedProjection
from oelm.methods.extras.split import SplitMultiheadAttention, SplitProjection, join_multihead
from oelm.methods.install import replace_module
from oelm.methods.reading.wrappers import is_adapter, plain_parameters, unwrap, uses_peft
from oelm.methods.record import Record, detach_record, record_of, require_parameter, require_record
from oelm.methods.saving.fold import added_parameters, folded_parameters, unfoldable_parameters


@torch.no_grad()
def remove(model: nn.Module, *, fold: bool = True) -> nn.Module:
    """Undo `oelm.apply()` in place, but keep the present weights; return the model.

    Q and K become trainable (unless they were frozen before `oelm.apply()`).
    The original module classes, parameter names and `save_pretrained` are restored, so that another method
    can be applied. Build a new optimizer afterwards.

    Args:
        fold: Fold low-rank adapters, biases, cores and temperatures into the matrices, so that the outputs
            of the model do not change. A convolution, a relative bias, and a trainable bias on a projection
            that had no bias cannot be folded and raise an error. If False, all extras are deleted, which
            changes the outputs.

    Examples:
        >>> import torch, oelm
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> applied = oelm.apply(encoder, "oelm-freeze", seed=42)
        >>> plain = remove(encoder)
        >>> plain is encoder, all(p.requires_grad for p in plain.parameters())
        (True, True)
    """
    record = require_record(model, "remove")
    plain = unwrap(model)
    _check_removable(plain, record, fold)
    keep_frozen = set(plain_parameters(model)) if uses_peft(model) else set(record.frozen_before)
    for name in record.tensors:
        require_parameter(plain, name).requires_grad_(name not in keep_frozen)
    for name, original in reversed(record.replaced):
        module = plain.get_submodule(name)
        if isinstance(module, ExtendedProjection):
            _restore_extended(module, original, fold)
        else:
            assert isinstance(module, SplitProjection)
            _restore_fused(module, original)
        replace_module(plain, name, original)
    for module in plain.modules():
        if isinstance(module, SplitMultiheadAttention):
            join_multihead(module)
        if hasattr(module, "add_relative_bias"):
            module.register_parameter("relative_bias", None)
        _remove_our_hooks(module)
        if type(module.__dict__.get("save_pretrained")).__module__.startswith("oelm."):
            del module.__dict__["save_pretrained"]
    for name, use_cache in record.use_cache.items():
        getattr(plain, name).use_cache = use_cache
    detach_record(plain)
    return plain


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Turn off the trainable extras of the method inside a `with` block; frozen tensors stay frozen.

    If the method has no extras, nothing changes. Inside the block, the extras are not among the model's
    parameters, so `oelm.save()`, `oelm.audit()` and `oelm.remove()` are errors there. Do not train the model
    in the block.

    Examples:
        >>> import torch, oelm
        >>> from oelm.models.gpt import GPT, gpt_config
        >>> gpt = GPT(gpt_config("smoke", vocab_size=8, context=4))
        >>> applied = oelm.apply(gpt, "oelm-lowrank")
        >>> with disabled(gpt):
        ...     logits = gpt.logits(torch.zeros(1, 4, dtype=torch.long))
    """
    present = record_of(model)
    if present is not None and present.disabled:  # a block inside a block
        yield
        return
    record = require_record(model, "disabled")
    plain = unwrap(model)
    held: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for path in added_parameters(plain):
        owner, _, name = path.rpartition(".")
        parameters = plain.get_submodule(owner)._parameters
        held.append((parameters, name, parameters[name]))  # type: ignore[arg-type]
    try:
        for parameters, name, _ in held:
            parameters[name] = None
        record.disabled = bool(held)
        yield
    finally:
        record.disabled = False
        for parameters, name, parameter in held:
            parameters[name] = parameter


def _check_removable(model: nn.Module, record: Record, fold: bool) -> None:
    """Raise OelmError if `remove()` cannot restore the plain model; called before any change."""
    if fold and (left := unfoldable_parameters(model)):
        raise OelmError(
            f"remove: {', '.join(left[:3])}, which '{record.method.name}' added, cannot be folded into the "
            f"plain model. To delete these parameters, call oelm.remove(model, fold=False)"
        )
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise OelmError("remove: the parameters are sharded (FSDP); call oelm.remove before sharding")
    for name, _ in record.replaced:
        module = model.get_submodule(name)
        if any(is_adapter(inner) for inner in module.modules()):
            raise OelmError(
                f"remove: {name} has a PEFT adapter; call merge_and_unload() or unload() of the PEFT model "
                f"first"
            )
        if not isinstance(module, ExtendedProjection | SplitProjection):
            raise OelmError(
                f"remove: {name} was replaced after oelm.apply by a {type(module).__name__}; put the "
                f"module of oelm back first"
            )


def _restore_extended(module: ExtendedProjection, original: Any, fold: bool) -> None:
    if fold:
        for parameter, folded in list(folded_parameters(module)):
            parameter.data = folded
    original.weight, original.bias = module.weight, module.bias
    original.train(module.training)


def _restore_fused(module: SplitProjection, original: Any) -> None:
    for kind in ("weight", "bias"):
        joined = getattr(module, kind)
        if joined is not None:
            trains = any(getattr(part, kind).requires_grad for part in module.children())
            setattr(original, kind, nn.Parameter(joined.detach().contiguous(), requires_grad=trains))
    original.train(module.training)


def _remove_our_hooks(module: nn.Module) -> None:
    for kind in ("forward_pre_hooks", "forward_hooks", "state_dict_hooks", "load_state_dict_pre_hooks"):
        hooks = getattr(module, f"_{kind}")
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook).__module__.startswith("oelm.methods."):
                del hooks[key]
                for options in ("with_kwargs", "always_called"):
                    getattr(module, f"_{kind}_{options}", {}).pop(key, None)
