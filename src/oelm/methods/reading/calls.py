"""Find arguments with which an attention module can be called.

They are guessed from the signature of its `forward()`, or observed in a forward pass of the
model.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 6
Call = tuple[tuple[Any, ...], dict[str, Any]]

# Usual argument names of `forward()` for the input of the key projection, the input of the query projection,
# rotary position embeddings, and other position embeddings.
_KEY_INPUTS = {
    *("key", "value", "k", "v", "keys", "values", "key_states", "value_states", "context", "memory", "kv"),
    *("encoder_hidden_states", "key_value_states", "current_states", "key_value", "latents"),
    "cross_attention_states",
}
_QUERY_INPUTS = {"hidden_states", "query", "query_states", "x"}
_ROTARY = {
    *("position_embeddings", "rotary_pos_emb", "rotary_emb", "rotary_position_embeddings"),
    "position_embedding",
}
_ROTARY_SIZES = ("qk_rope_head_dim", "rotary_ndims", "rotary_dim", "rope_head_dim")
_POSITIONS = {"relative_position_embeddings", "pos_emb", "r", "position_embeds", "pos_embeds"}
_ADDED_POSITIONS = {"object_queries", "spatial_position_embeddings"}  # added to the hidden states

#: Input shapes to try. The input width replaces -1, or is appended as the last dimension if there is no -1.
_SHAPES = ((1, TOKENS), (TOKENS,), (1, 4, 4), (1, -1, TOKENS), (1, -1, 4, 4), (TOKENS, 1))
_POSITION_FORMS = ("cos and sin", "relative", "absolute", "complex")


def guess_calls(
    module: nn.Module, config: Any, width: int, key_width: int, head_dim: int, generator: torch.Generator
) -> Iterator[Call]:
    """Yield (args, kwargs) for `module.forward()` that fit its signature, with the most common shapes first.

    width, key_width: The input widths (d_in) of the query and of the key projections.
    """
    signature = inspect.signature(module.forward).parameters
    parameters = [p for p in signature.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    sizes = [
        n for s in (module, config) for name in _ROTARY_SIZES if isinstance(n := getattr(s, name, 0), int)
    ]
    rotary_sizes = [
        n for n in dict.fromkeys([*sizes, *(n // 2 for n in sizes), head_dim, head_dim // 2]) if n > 0
    ]
    draw = partial(torch.randn, generator=generator)
    named = {p.name for p in parameters}
    positions = _POSITION_FORMS if named & _ROTARY else _POSITION_FORMS[:1]
    window = getattr(module, "window_size", None)  # window attention may accept only full windows of tokens
    sides = tuple(window) if isinstance(window, list | tuple) else (window, window)
    shapes = [*_SHAPES, (1, sides[0] * sides[-1])] if all(isinstance(n, int) for n in sides) else _SHAPES
    # A module may pass `attention_mask` from its **kwargs to its attention kernel, so also try it with None.
    hands_on = "attention_mask" not in named and any(p.kind is p.VAR_KEYWORD for p in signature.values())
    masks: list[dict[str, Any]] = [{}, {"attention_mask": None}] if hands_on else [{}]
    for shape, form, rotary, cross, mask in itertools.product(
        shapes, positions, rotary_sizes, (False, True), masks
    ):
        kwargs: dict[str, Any] = dict(mask)
        for index, p in enumerate(parameters):
            required = p.default is p.empty
            value: Any = None
            if index == 0 or (required and p.name in _QUERY_INPUTS):
                value = draw(_sized(shape, width))
            elif p.name in _KEY_INPUTS and (
                cross or required or not p.name.startswith(("encoder", "key_value"))
            ):
                value = draw(_sized(shape, key_width))
            elif p.name in _ROTARY:
                value = _positions(form, shape, rotary, width, draw)
            elif p.name in _POSITIONS:
                value = draw(1, 2 * TOKENS - 1, width)
            elif p.name in _ADDED_POSITIONS:
                value = draw(_sized(shape, width))
            elif p.name in ("cu_seqlens", "cu_seq_lens"):
                value = torch.tensor([0, TOKENS], dtype=torch.int32)
            elif p.name == "position_ids":
                value = torch.arange(TOKENS)[None]
            if value is not None or required:
                kwargs[p.name] = value
        yield (), kwargs


def _sized(shape: tuple[int, ...], width: int) -> list[int]:
    return [width if n == -1 else n for n in shape] + ([] if -1 in shape else [width])


def _positions(form: str, shape: tuple[int, ...], rotary: int, width: int, draw: Any) -> Any:
    """Return random position embeddings of the kind `form`, one of _POSITION_FORMS.

    `rotary` is the number of rotated dimensions of a head.
    """
    batch = () if shape == (TOKENS,) else (1,)
    if form == "relative":
        return draw(1, 2 * TOKENS - 1, width)
    if form == "absolute":
        return draw(*batch, TOKENS, width)
    angle = draw(*batch, TOKENS, rotary)
    return torch.polar(torch.ones_like(angle), angle) if form == "complex" else (angle.cos(), angle.sin())


def guess_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """Return small inputs that a Hugging Face model may accept, made from its config; [] for other models."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or not isinstance(name, str):
        return []
    accepted = list(inspect.signature(model.forward).parameters)
    name = name if name in accepted or not accepted else accepted[0]
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None) or 32
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = getattr(vision, "num_channels", 3)
    frames = getattr(vision, "num_frames", 4)
    features = {
        n
        for key in (
            *("feature_projection_input_dim", "num_mel_bins", "input_dim", "input_feat_size", "input_size"),
            *("hidden_size", "d_model"),
        )
        if isinstance(n := getattr(config, key, None), int)
    } or {80}
    first = next((p for p in model.parameters() if p.dim() > 1), None)  # it projects the model's input
    flat = 1 if first is None else first[0].numel()
    features.add(flat)
    images = [draw(1, channels, height, width), draw(1, frames, channels, height, width)]
    forms: dict[str, list[Tensor]] = {
        "pixel_values": images,
        "pixel_values_videos": images[1:],
        "input_values": [draw(1, 4000), draw(1, 1, 4000), draw(1, 512, 128)],
        "input_features": [draw(shape) for n in sorted(features) for shape in ((1, 32, n), (1, n, 64))],
        "inputs_embeds": [draw(1, 8, n) for n in sorted(features)],
        "hidden_states": [draw(1, 8, n) for n in sorted(features)],
        "inputs": [draw(1, 8, n) for n in sorted(features)],
    }
    guesses: list[dict[str, Any]] = [{name: value} for value in forms.get(name, [])]
    for guess in guesses if (mask := f"{name}_mask") in accepted else ():
        guess[mask] = torch.ones(guess[name].shape[:2], dtype=torch.bool)
    if "grid_thw" in accepted:  # 16 flat patches of one image
        guesses.append({accepted[0]: draw(16, flat), "grid_thw": torch.tensor([[1, 4, 4]])})
    for length in (8, 1024):  # on short texts, sparse attention is not sparse
        ids = 3 + torch.arange(length)[None] % 8
        text: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(config, "is_encoder_decoder", False):
            text["decoder_input_ids"] = ids[:, :8]
        if "bbox" in accepted:
            box = torch.arange(8).expand(1, length, 8)[..., : getattr(config, "dim_bbox", 4)]
            text["bbox"] = box if hasattr(config, "max_2d_position_embeddings") else box / 8
        if "pixel_values" in accepted:
            guesses += [{**text, "pixel_values": image} for image in images]
        guesses.append(text)
    return guesses


def observe_model(model: nn.Module, attentions: Mapping[str, nn.Module], inputs: Any) -> dict[str, Call]:
    """Return the arguments with which the model calls its attention modules, by module name.

    If `inputs` is None, guessed inputs are passed to the model, then to the Hugging Face models inside it.
    This is not done if the model has low-precision parameters on a CPU: its forward pass would be slow, and
    crashes the process on some machines.
    """
    seen: dict[str, Call] = {}
    if inputs is not None:
        observe_calls(model, attentions, inputs, seen)
        return seen
    for p in model.parameters():
        if p.is_meta or (p.device.type == "cpu" and p.dtype not in (torch.float32, torch.float64)):
            return {}
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        inside = {n: m for n, m in attentions.items() if n.startswith(prefix)}
        for guessed in guess_inputs(part) if inside else ():
            if inside.keys() <= seen.keys():
                break
            with contextlib.suppress(Exception):  # keep the calls observed before an error
                observe_calls(part, inside, guessed, seen)
    return seen


@torch.no_grad()
def observe_calls(
    model: nn.Module, attentions: Mapping[str, nn.Module], inputs: Any, seen: dict[str, Call]
) -> None:
    """Call the model once on `inputs`; add to `seen` the arguments of each attention module's first call.

    Tensors among the arguments are copied to the CPU in float32. The model is not changed.
    """
    handles = []
    for name, module in attentions.items():

        def hook(_module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            with contextlib.suppress(Exception):  # skip arguments that cannot be copied
                if name not in seen:
                    seen[name] = copy.deepcopy((_plain(args), _plain(kwargs)))

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    modes = [(module, module.training) for module in model.modules()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    moved = _move(inputs, device)
    try:
        model.eval()
        if isinstance(moved, Mapping):
            model(**moved)
        else:
            model(*moved) if isinstance(moved, tuple | list) else model(moved)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training


def _plain(value: Any) -> Any:
    """Return an argument in which all tensors are copied to the CPU, floating-point ones in float32.

    A key/value cache becomes None, because each further call would add tokens to the cache.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.float() if value.is_floating_point() else value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_plain(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return None if hasattr(value, "get_seq_length") else value


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: _move(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_move(v, device) for v in value]
    return value
