"""Export our GPT to the Hugging Face GPT-2 format, and import models from it.

GPT-2 has the same architecture (pre-LN, learned positions, exact GELU as "gelu", tied head) plus attention
biases, which are exported as zeros. Parameters that a method added are folded into the matrices where
possible. Models that GPT-2 cannot represent (rotary positions, a convolution, a relative bias, a
classification head) raise an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from oelm.errors import OelmError
from oelm.methods.saving.fold import folded_state
from oelm.models.gpt import GPT, Block, GPTConfig

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel


def gpt2_config(config: GPTConfig, *, eos_id: int | None = None) -> GPT2Config:
    """Return the Hugging Face config of a GPT-2 with the shape of `config`."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_inner=config.ff,
        activation_function="gelu",
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        bos_token_id=eos_id,
        eos_token_id=eos_id,
    )


def to_gpt2(model: GPT, *, eos_id: int | None = None) -> GPT2LMHeadModel:
    """Return a Hugging Face GPT-2 that computes the same logits as `model`."""
    from transformers import GPT2LMHeadModel

    model = _plain(model)
    theirs = GPT2LMHeadModel(gpt2_config(model.config, eos_id=eos_id))
    state = {name: tensor.detach().clone() for name, tensor in _gpt2_state(model).items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    theirs.load_state_dict(state, strict=True)
    return theirs.eval()


def export_hf(model: GPT, folder: Path | str, *, eos_id: int | None = None) -> None:
    """Write a folder that `transformers.GPT2LMHeadModel.from_pretrained` loads."""
    to_gpt2(model, eos_id=eos_id).save_pretrained(folder)


def import_hf(folder: Path | str) -> GPT:
    """Return our GPT with the weights of a GPT-2 folder; raise OelmError if our GPT cannot represent it."""
    from transformers import GPT2LMHeadModel

    c = _read_gpt2_config(Path(folder))
    try:
        theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OelmError(f"{folder}: cannot load the weights: {error}") from None
    ours = GPT(
        GPTConfig(
            vocab_size=c.vocab_size,
            context=c.n_positions,
            width=c.n_embd,
            layers=c.n_layer,
            heads=c.n_head,
            ff=c.n_inner or 4 * c.n_embd,
            dropout=c.resid_pdrop,
        )
    )
    source = theirs.state_dict()
    for name, tensor in _gpt2_state(ours).items():
        theirs_tensor = source[name]
        if name.endswith(("attn.c_attn.bias", "attn.c_proj.bias")):
            if theirs_tensor.abs().max() > 0:
                raise OelmError(
                    f"cannot import {folder}: {name} is not zero, but our GPT has no bias in Q/K/V/O"
                )
        elif name.endswith("attn.c_attn.weight"):
            block = cast(Block, ours.blocks[int(name.split(".")[2])])
            for part, weight in zip("qkv", theirs_tensor.chunk(3, dim=1), strict=True):
                getattr(block.attn, part).weight.data.copy_(weight.T)
        else:
            tensor.data.copy_(theirs_tensor)
    return ours


# GPT-2 settings that change its output and are fixed in our GPT: field -> the only supported value.
_SUPPORTED = {
    "activation_function": "gelu",
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def _read_gpt2_config(folder: Path) -> GPT2Config:
    """Return the folder's GPT-2 config; raise OelmError if our GPT cannot compute the same outputs."""
    from transformers import AutoConfig, GPT2Config

    if not (folder / "config.json").is_file():
        raise OelmError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise OelmError(f"{folder}: cannot load config.json: {error}") from None
    if not isinstance(config, GPT2Config):
        raise OelmError(f"{folder} is a {config.model_type} model; only GPT-2 can be imported")
    for field, ours in _SUPPORTED.items():
        if (value := getattr(config, field)) != ours:
            raise OelmError(f"{folder}: our GPT cannot represent {field}={value!r}, only {ours!r}")
    return config


def _gpt2_state(model: GPT) -> dict[str, Tensor]:
    """Return our tensors under GPT-2's names and in its layout (Conv1D weights are (in, out))."""
    assert model.positions is not None
    state: dict[str, Tensor] = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.positions.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
    }
    for i, block in enumerate(cast(list[Block], model.blocks)):
        attn, mlp, at = block.attn, block.mlp, f"transformer.h.{i}."
        qkv = torch.cat([attn.q.weight, attn.k.weight, attn.v.weight]).T
        state |= {
            at + "ln_1.weight": block.norm1.weight,
            at + "ln_1.bias": block.norm1.bias,
            at + "ln_2.weight": block.norm2.weight,
            at + "ln_2.bias": block.norm2.bias,
            at + "attn.c_attn.weight": qkv,
            at + "attn.c_attn.bias": qkv.new_zeros(qkv.shape[1]),
            at + "attn.c_proj.weight": attn.o.weight.T,
            at + "attn.c_proj.bias": qkv.new_zeros(qkv.shape[0]),
            at + "mlp.c_fc.weight": mlp.up.weight.T,
            at + "mlp.c_fc.bias": mlp.up.bias,
            at + "mlp.c_proj.weight": mlp.down.weight.T,
            at + "mlp.c_proj.bias": mlp.down.bias,
        }
    return state


def _plain(model: GPT) -> GPT:
    """Return the model with the method's parameters folded in; raise OelmError if it does not fit GPT-2."""
    reason = None
    if model.config.classes:
        reason = "it has a classification head, and GPT-2 pools tokens differently"
    elif model.config.position == "rope":
        reason = "it has rotary positions, and GPT-2 has learned positions"
    if reason:
        raise OelmError(f"cannot export this model as GPT-2: {reason}. Use oelm.save instead.")
    plain = GPT(model.config)
    plain.load_state_dict(folded_state(model))
    return plain
