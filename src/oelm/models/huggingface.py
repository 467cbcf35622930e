"""Our GPT as a transformers GPT-2 folder, and back.

GPT-2 holds what the study's architecture needs (pre-LN, learned positions, exact GELU as "gelu", a tied
head) and biases that ours lacks: they are written as zeros. A method's extras are folded into the matrices
where they can be. What GPT-2 cannot hold (rotary positions, a convolution, a relative bias, a classification
head) is refused with a word on why.
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
    """transformers' name for each of our sizes."""
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
    """A transformers GPT-2 with the same logits."""
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
    """Our GPT from a GPT-2 folder with the same logits; refused where ours has no place for a weight."""
    from transformers import GPT2LMHeadModel

    c = _read_gpt2_config(Path(folder))
    try:
        theirs = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OelmError(f"{folder}: its weights do not load: {error}") from None
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
                raise OelmError(f"{folder}: {name} is not zero, and this GPT has no bias in Q/K/V/O")
        elif name.endswith("attn.c_attn.weight"):
            block = cast(Block, ours.blocks[int(name.split(".")[2])])
            for part, weight in zip("qkv", theirs_tensor.chunk(3, dim=1), strict=True):
                getattr(block.attn, part).weight.data.copy_(weight.T)
        else:
            tensor.data.copy_(theirs_tensor)
    return ours


#: GPT-2's settings that change its numbers and that ours has no counterpart of: (field, ours, in words).
_FIXED = (
    ("activation_function", "gelu", "this GPT has the exact GELU ('gelu')"),
    ("tie_word_embeddings", True, "this GPT's head is its embedding"),
    ("layer_norm_epsilon", 1e-5, "this GPT's norms have 1e-05"),
    ("scale_attn_weights", True, "this GPT divides scores by the root of the head size"),
    ("scale_attn_by_inverse_layer_idx", False, "this GPT scales every layer alike"),
)


def _read_gpt2_config(folder: Path) -> GPT2Config:
    """The config of a GPT-2 that ours can be; without this the import would be another network's."""
    from transformers import AutoConfig, GPT2Config

    if not (folder / "config.json").is_file():
        raise OelmError(f"{folder} holds no config.json: not a transformers folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise OelmError(f"{folder}: its config.json does not load: {error}") from None
    if not isinstance(config, GPT2Config):
        raise OelmError(f"{folder} holds a {config.model_type}, not a GPT-2")
    for field, ours, words in _FIXED:
        if getattr(config, field) != ours:
            raise OelmError(f"{folder}: its {field} is {getattr(config, field)!r}, {words}")
    return config


def _gpt2_state(model: GPT) -> dict[str, Tensor]:
    """GPT-2's tensor names -> ours in GPT-2's layout (Conv1D keeps (in, out)); views where possible."""
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
    """The same network without a method's extras, or a word on what GPT-2 has no place for."""
    reason = None
    if model.config.classes:
        reason = "it has a classification head (and GPT-2's classifier pools differently)"
    elif model.config.position == "rope":
        reason = "it has rotary positions, GPT-2 has learned ones"
    if reason:
        raise OelmError(f"this model cannot be written as a GPT-2 folder: {reason}. Use oelm.save instead")
    plain = GPT(model.config)
    plain.load_state_dict(folded_state(model))
    return plain
