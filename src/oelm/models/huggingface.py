"""Export oelm's GPT to Hugging Face formats: with learned positions to GPT-2, with rotary ones to GPT-NeoX.

With the right config, GPT-2 and GPT-NeoX have the same architecture as oelm's GPT (pre-LN, exact GELU, tied
head; for GPT-NeoX sequential residuals and rotation of all dimensions of a head), plus attention biases.
These biases are zeros unless a method trains biases. The other parameters that a method adds to q and k
(low-rank adapters, core matrices, temperatures) are merged into the weights. Exporting a classification head,
a convolution or a relative bias raises an error, because GPT-2 and GPT-NeoX cannot represent them. GPT-2
models can also be imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from oelm.errors import OelmError
from oelm.methods.extras.extended import ExtendedProjection
from oelm.methods.saving.fold import folded_projection, unfoldable_parameters
from oelm.models.gpt import GPT, ROTARY_BASE, Attention, Block, GPTConfig

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM


def gpt2_config(config: GPTConfig, *, eos_id: int | None = None) -> GPT2Config:
    """Return the Hugging Face config of a GPT-2 with the shape of `config`."""
    from transformers import GPT2Config

    unread: dict[str, Any] = {"n_ctx": config.context}  # read by the GGUF converter of llama.cpp alone
    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context,
        **unread,
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


def gpt_neox_config(config: GPTConfig, *, eos_id: int | None = None) -> GPTNeoXConfig:
    """Return the Hugging Face config of a GPT-NeoX with the shape and rotary positions of `config`."""
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.context,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.ff,
        hidden_act="gelu",
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        use_parallel_residual=False,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": ROTARY_BASE,
            "partial_rotary_factor": 1.0,  # rotate all dimensions of a head
        },
        bos_token_id=eos_id,
        eos_token_id=eos_id,
    )


def to_hf(model: GPT, *, eos_id: int | None = None) -> GPT2LMHeadModel | GPTNeoXForCausalLM:
    """Return a Hugging Face GPT-2 or GPT-NeoX that computes the same logits as `model`."""
    _check_exportable(model)
    theirs: Any
    if model.config.position == "rope":
        from transformers import GPTNeoXForCausalLM

        theirs = GPTNeoXForCausalLM(gpt_neox_config(model.config, eos_id=eos_id))
        state = _gpt_neox_state(model)
    else:
        from transformers import GPT2LMHeadModel

        theirs = GPT2LMHeadModel(gpt2_config(model.config, eos_id=eos_id))
        state = _gpt2_state(model)
    missing, unexpected = theirs.load_state_dict({n: t.detach() for n, t in state.items()}, strict=False)
    assert len(missing) == 1, missing  # the LM head, which is tied to the embedding
    assert not unexpected, unexpected
    return theirs.eval()


def export_hf(model: GPT, folder: Path | str, *, eos_id: int | None = None) -> None:
    """Write the model as a folder that `transformers.AutoModelForCausalLM.from_pretrained()` can load."""
    to_hf(model, eos_id=eos_id).save_pretrained(folder)


def import_hf(folder: Path | str) -> GPT:
    """Return oelm's GPT with the weights of the Hugging Face GPT-2 in `folder`.

    Raise OelmError if the GPT-2 has features that oelm's GPT lacks, such as attention biases.
    """
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
                    f"cannot import {folder}: {name} is not zero, but oelm's GPT has no biases in attention"
                )
        elif name.endswith("attn.c_attn.weight"):
            block = cast(Block, ours.blocks[int(name.split(".")[2])])
            for part, weight in zip("qkv", theirs_tensor.chunk(3, dim=1), strict=True):
                getattr(block.attn, part).weight.data.copy_(weight.T)
        else:
            tensor.data.copy_(theirs_tensor)
    return ours


# Config fields of GPT-2 that affect its outputs and are fixed in oelm's GPT -> the only supported value.
_SUPPORTED = {
    "activation_function": "gelu",
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def _read_gpt2_config(folder: Path) -> GPT2Config:
    """Return the GPT-2 config in `folder`; raise OelmError if oelm's GPT does not support it."""
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
            raise OelmError(f"{folder}: oelm's GPT does not support {field}={value!r}, only {ours!r}")
    return config


def _gpt2_state(model: GPT) -> dict[str, Tensor]:
    """Return the model's tensors with the names and shapes of GPT-2, which stores weights as (in, out)."""
    assert model.positions is not None
    state: dict[str, Tensor] = {
        "transformer.wte.weight": model.tokens.weight,
        "transformer.wpe.weight": model.positions.weight,
        "transformer.ln_f.weight": model.norm.weight,
        "transformer.ln_f.bias": model.norm.bias,
    }
    for i, block in enumerate(cast(list[Block], model.blocks)):
        attn, mlp, at = block.attn, block.mlp, f"transformer.h.{i}."
        weights, biases = _folded_qkv(attn)
        state |= {
            at + "ln_1.weight": block.norm1.weight,
            at + "ln_1.bias": block.norm1.bias,
            at + "ln_2.weight": block.norm2.weight,
            at + "ln_2.bias": block.norm2.bias,
            at + "attn.c_attn.weight": torch.cat(weights).T,
            at + "attn.c_attn.bias": torch.cat(biases),
            at + "attn.c_proj.weight": attn.o.weight.T,
            at + "attn.c_proj.bias": attn.o.weight.new_zeros(model.config.width),
            at + "mlp.c_fc.weight": mlp.up.weight.T,
            at + "mlp.c_fc.bias": mlp.up.bias,
            at + "mlp.c_proj.weight": mlp.down.weight.T,
            at + "mlp.c_proj.bias": mlp.down.bias,
        }
    return state


def _gpt_neox_state(model: GPT) -> dict[str, Tensor]:
    """Return the model's tensors with the names and shapes of GPT-NeoX.

    GPT-NeoX has one matrix for q, k and v. Its rows are q, k and v of the first head, then of the second, ...
    """
    state: dict[str, Tensor] = {
        "gpt_neox.embed_in.weight": model.tokens.weight,
        "gpt_neox.final_layer_norm.weight": model.norm.weight,
        "gpt_neox.final_layer_norm.bias": model.norm.bias,
    }
    heads = model.config.heads
    for i, block in enumerate(cast(list[Block], model.blocks)):
        attn, mlp, at = block.attn, block.mlp, f"gpt_neox.layers.{i}."
        weights, biases = _folded_qkv(attn)
        weight = torch.cat([w.unflatten(0, (heads, -1)) for w in weights], dim=1)  # (H, 3 hs, d)
        bias = torch.cat([b.unflatten(0, (heads, -1)) for b in biases], dim=1)  # (H, 3 hs)
        state |= {
            at + "input_layernorm.weight": block.norm1.weight,
            at + "input_layernorm.bias": block.norm1.bias,
            at + "post_attention_layernorm.weight": block.norm2.weight,
            at + "post_attention_layernorm.bias": block.norm2.bias,
            at + "attention.query_key_value.weight": weight.flatten(0, 1),
            at + "attention.query_key_value.bias": bias.flatten(),
            at + "attention.dense.weight": attn.o.weight,
            at + "attention.dense.bias": attn.o.weight.new_zeros(model.config.width),
            at + "mlp.dense_h_to_4h.weight": mlp.up.weight,
            at + "mlp.dense_h_to_4h.bias": mlp.up.bias,
            at + "mlp.dense_4h_to_h.weight": mlp.down.weight,
            at + "mlp.dense_4h_to_h.bias": mlp.down.bias,
        }
    return state


def _folded_qkv(attn: Attention) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights and the biases of q, k and v, including the parameters that the method added."""
    folded = [_folded(projection) for projection in (attn.q, attn.k, attn.v)]
    weights = [weight for weight, _ in folded]
    return weights, [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in folded]


def _folded(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    if isinstance(projection, ExtendedProjection):
        return folded_projection(projection)
    assert isinstance(projection, nn.Linear)
    return projection.weight, projection.bias


def _check_exportable(model: GPT) -> None:
    """Raise OelmError if neither GPT-2 nor GPT-NeoX can represent the model."""
    if model.config.classes:
        raise OelmError(
            "cannot export this model: it has a classification head, and GPT-2 and GPT-NeoX pool tokens "
            "differently. Use oelm.save instead."
        )
    left = [name for name in unfoldable_parameters(model) if not name.endswith(".extra_bias")]
    if left:
        raise OelmError(
            f"cannot export this model: GPT-2 and GPT-NeoX cannot represent these parameters, which the "
            f"method added: {', '.join(left[:3])}. Use oelm.save instead."
        )
