"""Write a model with a method as a plain transformers model with the same outputs.

Extras are folded into the matrices. If the method adds a bias to a projection without bias, the config of the
plain model must turn on biases. For example, a Llama with `attention_bias=True` has biases on q, k, v and o;
those of v and o are then set to zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oelm.methods.extras.extended import ExtendedProjection
from oelm.methods.saving.fold import fold_all, folded_projection, unfoldable_parameters

#: Settings of transformers' configs that add biases to the attention projections.
BIAS_SETTINGS = ("attention_bias", "qkv_bias")


class PlainModel(NamedTuple):
    """The state dict of a plain model, and the config settings that must be changed for it."""

    state: dict[str, Tensor]
    settings: dict[str, bool]

    def write(self, model: nn.Module, folder: Any, **rest: Any) -> Any:
        """Write the plain model with the `save_pretrained()` of transformers."""
        with changed_settings(model, self.settings):
            return type(model).save_pretrained(model, folder, state_dict=self.state, **rest)  # type: ignore[attr-defined]


@torch.no_grad()
def plain_model(model: nn.Module) -> PlainModel | None:
    """Return the plain model with the same outputs as a transformers model with a method.

    Return None if no plain model has the same outputs.
    """
    left = unfoldable_parameters(model)
    if not left:
        return PlainModel(fold_all(model), {})
    if not all(name.endswith(".extra_bias") for name in left):
        return None
    state = fold_all(model)
    for name in left:
        owner = name.removesuffix(".extra_bias")
        module = model.get_submodule(owner)
        assert isinstance(module, ExtendedProjection)
        _, bias = folded_projection(module)
        assert bias is not None
        state[f"{owner}.bias"] = bias.to(module.weight.dtype)
    for setting in BIAS_SETTINGS:
        if getattr(getattr(model, "config", None), setting, None) is False:
            expected = _state_with(model, setting)
            zeros = {
                name: state[f"{name.removesuffix('.bias')}.weight"].new_zeros(tensor.shape)
                for name, tensor in expected.items()
                if name not in state and name.endswith(".bias")
            }
            if set(expected) == set(state | zeros):
                return PlainModel(state | zeros, {setting: True})
    return None


@contextmanager
def changed_settings(model: nn.Module, settings: dict[str, bool]) -> Iterator[None]:
    """Change settings of the model's config inside a `with` block; restore them at its end."""
    config: Any = getattr(model, "config", None)
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _state_with(model: nn.Module, setting: str) -> dict[str, Tensor]:
    """Return the state dict, on the meta device, that a model of this class has if `setting` is True."""
    config: Any = copy.deepcopy(model.config)
    setattr(config, setting, True)
    with torch.device("meta"):
        return type(model)(config).state_dict()
