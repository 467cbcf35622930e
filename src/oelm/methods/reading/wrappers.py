"""The model inside wrappers: DistributedDataParallel, torch.compile, AveragedModel, PEFT.

PEFT wraps twice: a `PeftModel` around the model, and an adapter layer around each targeted layer, whose own
weight then is `<layer>.base_layer.weight`. Records use the names of the plain model throughout.
"""

from __future__ import annotations

from torch import nn

from oelm.errors import UsageError

#: Steps in a parameter's path that wrappers of a single module add.
_WRAPPER_STEPS = frozenset({"base_layer", "_orig_mod", "_checkpoint_wrapped_module"})


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, torch.compile, AveragedModel, PEFT and the like."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"a model is a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: nn.Module) -> nn.Module | None:
    if (compiled := model._modules.get("_orig_mod")) is not None:
        return compiled
    if _is_of_peft(model):
        # Prompt learning holds the model as `base_model`; adapters hold a tuner there, and it the model.
        return model._modules.get("base_model") or model._modules.get("model")
    kind = type(model).__name__
    return model._modules.get("module") if kind.endswith("Parallel") or kind == "AveragedModel" else None


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def is_adapter(module: object) -> bool:
    """Whether PEFT put this module around a layer (LoRA, DoRA, IA3 and so on)."""
    return isinstance(module, nn.Module) and _is_of_peft(module) and "base_layer" in module._modules


def base_layer(module: nn.Module) -> nn.Module:
    """The layer inside PEFT's adapters; the module itself if it has none."""
    while is_adapter(module):
        module = module.get_submodule("base_layer")
    return module


def uses_peft(model: nn.Module) -> bool:
    """Whether PEFT wraps the model or a part of it, and so decides what else is frozen."""
    return any(_is_of_peft(module) for module in model.modules())


def plain_name(name: str) -> str:
    """A parameter's name without the steps that wrappers add to its path."""
    return ".".join(step for step in name.split(".") if step not in _WRAPPER_STEPS)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter by its name in the plain model; those of a wrapper itself by their own names.

    >>> list(plain_parameters(nn.DataParallel(nn.Linear(2, 2))))
    ['weight', 'bias']
    """
    inside = {plain_name(name): parameter for name, parameter in unwrap(model).named_parameters()}
    held = {id(parameter) for parameter in inside.values()}
    return inside | {name: p for name, p in model.named_parameters() if id(p) not in held}


def trainable_adapters(model: nn.Module) -> dict[int, list[str]]:
    """By id of a parameter of a layer inside adapters: the adapter parameters on it that train."""
    found: dict[int, list[str]] = {}
    for name, module in unwrap(model).named_modules():
        if is_adapter(module):
            own = {id(p) for p in base_layer(module).parameters()}
            training = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own]
            for parameter in own:
                found[parameter] = [plain_name(f"{name}.{n}") for n in training]
    return found
