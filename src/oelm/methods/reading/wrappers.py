"""Find the plain model and its parameter names inside DDP, torch.compile, AveragedModel and PEFT.

PEFT wraps twice: it puts a `PeftModel` around the model, and an adapter around each targeted layer. The
weight of the layer is then named `<layer>.base_layer.weight`. oelm always uses the names of the plain model.
"""

from __future__ import annotations

from torch import nn

from oelm.errors import UsageError

#: Parts that wrappers insert into parameter names, as in `<layer>.base_layer.weight`.
_WRAPPER_STEPS = frozenset({"base_layer", "_orig_mod", "_checkpoint_wrapped_module"})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the plain model inside wrappers such as DistributedDataParallel, torch.compile and PEFT."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: nn.Module) -> nn.Module | None:
    if (compiled := model._modules.get("_orig_mod")) is not None:
        return compiled
    if _is_from_peft(model):
        # With prompt learning, the plain model is PeftModel.base_model; with adapters, base_model.model.
        return model._modules.get("base_model") or model._modules.get("model")
    kind = type(model).__name__
    return model._modules.get("module") if kind.endswith("Parallel") or kind == "AveragedModel" else None


def _is_from_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def is_adapter(module: object) -> bool:
    """Return whether a module is a PEFT adapter around a layer (LoRA, DoRA, IA3 and so on)."""
    return isinstance(module, nn.Module) and _is_from_peft(module) and "base_layer" in module._modules


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer inside PEFT's adapters; a module without adapter is returned unchanged."""
    while is_adapter(module):
        module = module.get_submodule("base_layer")
    return module


def uses_peft(model: nn.Module) -> bool:
    """Return whether PEFT wraps the model or a part of it; PEFT then freezes all but its own parameters."""
    return any(_is_from_peft(module) for module in model.modules())


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(step for step in name.split(".") if step not in _WRAPPER_STEPS)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a dict from name to parameter, with the names in the plain model.

    Parameters that belong to a wrapper itself keep their full names.

    >>> list(plain_parameters(nn.DataParallel(nn.Linear(2, 2))))
    ['weight', 'bias']
    """
    inside = {plain_name(name): parameter for name, parameter in unwrap(model).named_parameters()}
    held = {id(parameter) for parameter in inside.values()}
    return inside | {name: p for name, p in model.named_parameters() if id(p) not in held}


def trainable_adapters(model: nn.Module) -> dict[int, list[str]]:
    """Return a dict from id(parameter) to the names of the trainable PEFT parameters that adapt it."""
    found: dict[int, list[str]] = {}
    for name, module in unwrap(model).named_modules():
        if is_adapter(module):
            own = {id(p) for p in base_layer(module).parameters()}
            training = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own]
            for parameter in own:
                found[parameter] = [plain_name(f"{name}.{n}") for n in training]
    return found
