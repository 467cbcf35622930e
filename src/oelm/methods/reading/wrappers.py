"""Find the plain model and its parameter names inside DDP, torch.compile, AveragedModel and PEFT.

PEFT wraps twice: it puts a `PeftModel` around the model, and an adapter around each targeted layer, whose
weight is then named `<layer>.base_layer.weight`. oelm's records always use the names of the plain model.
"""

from __future__ import annotations

from torch import nn

from oelm.errors import UsageError

#: Parts that wrappers around a single module add to the names of its parameters.
_WRAPPER_STEPS = frozenset({"base_layer", "_orig_mod", "_checkpoint_wrapped_module"})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, torch.compile, AveragedModel, PEFT and the like."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"a model is a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: nn.Module) -> nn.Module | None:
    if (compiled := model._modules.get("_orig_mod")) is not None:
        return compiled
    if _is_from_peft(model):
        # With prompt learning, the model is PeftModel.base_model; with adapters, PeftModel.base_model.model.
        return model._modules.get("base_model") or model._modules.get("model")
    kind = type(model).__name__
    return model._modules.get("module") if kind.endswith("Parallel") or kind == "AveragedModel" else None


def _is_from_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def is_adapter(module: object) -> bool:
    """Return whether this module is a PEFT adapter around a layer (LoRA, DoRA, IA3 and so on)."""
    return isinstance(module, nn.Module) and _is_from_peft(module) and "base_layer" in module._modules


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer inside PEFT's adapters; the module itself if it has none."""
    while is_adapter(module):
        module = module.get_submodule("base_layer")
    return module


def uses_peft(model: nn.Module) -> bool:
    """Return whether PEFT wraps the model or a part of it; PEFT then freezes all other parameters."""
    return any(_is_from_peft(module) for module in model.modules())


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(step for step in name.split(".") if step not in _WRAPPER_STEPS)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter by its name in the plain model; a wrapper's own parameters keep their names.

    >>> list(plain_parameters(nn.DataParallel(nn.Linear(2, 2))))
    ['weight', 'bias']
    """
    inside = {plain_name(name): parameter for name, parameter in unwrap(model).named_parameters()}
    held = {id(parameter) for parameter in inside.values()}
    return inside | {name: p for name, p in model.named_parameters() if id(p) not in held}


def trainable_adapters(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of trainable adapter parameters, by the id of the parameter that they adapt."""
    found: dict[int, list[str]] = {}
    for name, module in unwrap(model).named_modules():
        if is_adapter(module):
            own = {id(p) for p in base_layer(module).parameters()}
            training = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own]
            for parameter in own:
                found[parameter] = [plain_name(f"{name}.{n}") for n in training]
    return found
