"""Tiny random models of every family, each with a batch that it accepts. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

import oelm

W, H, L, V = 32, 4, 3, 64  # width, heads, layers, vocabulary
ENCODER = {
    "vocab_size": V,
    "hidden_size": W,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "num_labels": 3,
}
DROPOUT_OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**ENCODER, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Family(NamedTuple):
    build: Callable[[], nn.Module]
    projections: int  # number of query and key projections
    layers: int = L


def _ids() -> Tensor:
    return torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(0))


def outputs(model: nn.Module) -> Tensor:
    """Run the model on its batch and return the output as one tensor."""
    if isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return model(_floats())
    if isinstance(model, nn.Transformer):
        return model(_floats(), _floats(1))
    if isinstance(model, nn.MultiheadAttention):
        keys = torch.randn(2, 5, model.kdim, generator=torch.Generator().manual_seed(2))
        values = torch.randn(2, 5, model.vdim, generator=torch.Generator().manual_seed(3))
        return model(_floats(), keys, values)[0]
    if isinstance(model, hf.ViTForImageClassification):
        return model(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))).logits
    if not isinstance(model, hf.PreTrainedModel):
        return model.logits(_ids())
    extra: dict[str, Any] = {"decoder_input_ids": _ids()[:, :4]} if model.config.is_encoder_decoder else {}
    if getattr(model.config, "add_cross_attention", False):
        extra["encoder_hidden_states"] = _floats()
    if hasattr(model.config, "use_cache"):
        extra["use_cache"] = False
    return model(input_ids=_ids(), **extra).logits


def _floats(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, W, generator=torch.Generator().manual_seed(seed))


def _own_gpt() -> nn.Module:
    from oelm.models.gpt import GPT, gpt_config

    return GPT(gpt_config("smoke", vocab_size=V, context=16))


def _encoder(kind: str, **rest: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(hf, f"{kind}Config")(**{**ENCODER, **DROPOUT_OFF, **rest})
        return getattr(hf, f"{kind}ForSequenceClassification")(config)

    return build


def _decoder(config: str, model: str, **rest: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**rest))


def _gpt2(**rest: Any) -> dict[str, Any]:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {"vocab_size": V, "n_embd": W, "n_layer": L, "n_head": H, "n_positions": 32, **off, **rest}


_T5 = {
    "vocab_size": V,
    "d_model": W,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": H,
    "dropout_rate": 0.0,
}
_BART = {
    "vocab_size": V,
    "d_model": W,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
_TINY_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, Family] = {
    "own-gpt": Family(_own_gpt, 4, 2),
    "bert": Family(_encoder("Bert"), 2 * L),
    "roberta": Family(_encoder("Roberta", **_TINY_IDS), 2 * L),
    "electra": Family(_encoder("Electra", embedding_size=W), 2 * L),
    "albert": Family(_encoder("Albert", embedding_size=16), 2, 1),
    "deberta-v2": Family(
        _encoder(
            "DebertaV2",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            max_relative_positions=8,
            pooler_dropout=0.0,
        ),
        4 * L,
    ),
    "deberta-v2-shared": Family(
        _encoder(
            "DebertaV2", relative_attention=True, pos_att_type=["p2c"], share_att_key=True, pooler_dropout=0.0
        ),
        2 * L,
    ),
    "deberta": Family(
        _encoder(
            "Deberta",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            max_relative_positions=8,
            pooler_dropout=0.0,
        ),
        4 * L,
    ),
    "squeezebert": Family(_encoder("SqueezeBert", embedding_size=W), 2 * L),
    "mpnet": Family(_encoder("MPNet"), 2 * L),
    "modernbert": Family(
        _encoder(
            "ModernBert",
            embedding_dropout=0.0,
            attention_dropout=0.0,
            mlp_dropout=0.0,
            classifier_dropout=0.0,
            bos_token_id=1,
            cls_token_id=1,
            eos_token_id=2,
            sep_token_id=2,
            pad_token_id=0,
        ),
        2 * L,
    ),
    "distilbert": Family(
        _decoder(
            "DistilBertConfig",
            "DistilBertForSequenceClassification",
            vocab_size=V,
            dim=W,
            n_layers=L,
            n_heads=H,
            hidden_dim=64,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
        2 * L,
    ),
    "vit": Family(
        _decoder(
            "ViTConfig",
            "ViTForImageClassification",
            hidden_size=W,
            num_hidden_layers=L,
            num_attention_heads=H,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
            num_labels=3,
            **DROPOUT_OFF,
        ),
        2 * L,
    ),
    "gpt2": Family(_decoder("GPT2Config", "GPT2LMHeadModel", **_gpt2()), 2 * L),
    "gpt2-cross": Family(_decoder("GPT2Config", "GPT2LMHeadModel", **_gpt2(add_cross_attention=True)), 4 * L),
    "gpt-bigcode": Family(
        _decoder("GPTBigCodeConfig", "GPTBigCodeForCausalLM", **_gpt2(multi_query=True)), 2 * L
    ),
    "gpt-bigcode-mha": Family(
        _decoder("GPTBigCodeConfig", "GPTBigCodeForCausalLM", **_gpt2(multi_query=False)), 2 * L
    ),
    "gpt-neox": Family(_decoder("GPTNeoXConfig", "GPTNeoXForCausalLM", **ENCODER), 2 * L),
    "codegen": Family(_decoder("CodeGenConfig", "CodeGenForCausalLM", **_gpt2(rotary_dim=4)), 2 * L),
    "gpt-neo": Family(
        _decoder(
            "GPTNeoConfig",
            "GPTNeoForCausalLM",
            vocab_size=V,
            hidden_size=W,
            num_layers=2,
            num_heads=H,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=32,
            **_TINY_IDS,
            embed_dropout=0.0,
            attention_dropout=0.0,
            resid_dropout=0.0,
        ),
        4,
        2,
    ),
    "gpt-neox-japanese": Family(
        _decoder("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", **ENCODER), 2 * L
    ),
    "openai-gpt": Family(_decoder("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", **_gpt2()), 2 * L),
    "ctrl": Family(_decoder("CTRLConfig", "CTRLLMHeadModel", **_gpt2(dff=64)), 2 * L),
    "bloom": Family(
        _decoder("BloomConfig", "BloomForCausalLM", vocab_size=V, hidden_size=W, n_layer=L, n_head=H), 2 * L
    ),
    "falcon": Family(
        _decoder(
            "FalconConfig",
            "FalconForCausalLM",
            **{**ENCODER, "new_decoder_architecture": True, "num_kv_heads": 2},
        ),
        2 * L,
    ),
    "falcon-multi-query": Family(
        _decoder(
            "FalconConfig",
            "FalconForCausalLM",
            **{**ENCODER, "new_decoder_architecture": False, "multi_query": True},
        ),
        2 * L,
    ),
    "mpt": Family(
        _decoder(
            "MptConfig", "MptForCausalLM", vocab_size=V, d_model=W, n_layers=L, n_heads=H, max_seq_len=32
        ),
        2 * L,
    ),
    "phi3": Family(_decoder("Phi3Config", "Phi3ForCausalLM", **LLAMA), 2 * L),
    "opt": Family(
        _decoder(
            "OPTConfig",
            "OPTForCausalLM",
            vocab_size=V,
            hidden_size=W,
            num_hidden_layers=L,
            ffn_dim=64,
            num_attention_heads=H,
            max_position_embeddings=32,
            word_embed_proj_dim=W,
            dropout=0.0,
            **_TINY_IDS,
        ),
        2 * L,
    ),
    "llama": Family(_decoder("LlamaConfig", "LlamaForCausalLM", **LLAMA), 2 * L),
    "mistral": Family(_decoder("MistralConfig", "MistralForCausalLM", **LLAMA), 2 * L),
    "qwen2": Family(_decoder("Qwen2Config", "Qwen2ForCausalLM", **LLAMA), 2 * L),
    "qwen3": Family(_decoder("Qwen3Config", "Qwen3ForCausalLM", **LLAMA, head_dim=16), 2 * L),
    "gemma2": Family(_decoder("Gemma2Config", "Gemma2ForCausalLM", **LLAMA, head_dim=8), 2 * L),
    "t5": Family(_decoder("T5Config", "T5ForConditionalGeneration", **_T5, decoder_start_token_id=0), 12, 4),
    "bart": Family(_decoder("BartConfig", "BartForConditionalGeneration", **_BART, **_TINY_IDS), 12, 4),
    "torch-encoder": Family(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(W, H, 64, 0.0, batch_first=True), L), 2 * L
    ),
    "torch-transformer": Family(lambda: nn.Transformer(W, H, 2, 2, 64, 0.0, batch_first=True), 12, 4),
    "torch-attention": Family(lambda: nn.MultiheadAttention(W, H, batch_first=True), 2, 1),
    "torch-attention-unpacked": Family(
        lambda: nn.MultiheadAttention(W, H, kdim=W - 8, vdim=W - 16, batch_first=True), 2, 1
    ),
}


def build(family: str) -> nn.Module:
    """Return a model of the family with reproducible weights, in evaluation mode."""
    torch.manual_seed(0)
    model = FAMILIES[family].build().eval()
    with torch.no_grad():  # most libraries init biases to zero, and a wrong split of zeros would go unseen
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    return model


def applied_model(family: str, method: Any = "oelm-freeze", seed: int = 1) -> nn.Module:
    """Return a model of the family to which a method was applied."""
    model = build(family)
    oelm.apply(model, method, seed=seed)
    return model


def trained_model(family: str, method: Any) -> nn.Module:
    """Return a model whose trainable parameters have moved far, so that lost extras change its output."""
    model = applied_model(family, method)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(oelm.param_groups(model, lr=1e-2, weight_decay=0.1))


def faults(report: oelm.AuditReport) -> dict[str, str]:
    """Return the faults of an audit by tensor."""
    return {row.tensor: " ".join(row.faults) for row in report.rows if row.faults}


def equal_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def frozen_layers(model: nn.Module) -> set[tuple[str, int]]:
    """Return (stack, layer) of each layer with a frozen query or key weight."""
    return {
        (p.place.stack, p.place.layer)
        for p in oelm.qk_projections(model)
        if not p.weight.parameter.requires_grad
    }


class Odd(nn.Module):
    """An attention with uninformative names: the first is q, the second k, the third v."""

    def __init__(self, width=16, names=("alpha", "beta", "gamma")):
        super().__init__()
        self.n, self.names = 2, names
        for name in names:
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x):
        q, k, v = (getattr(self, n)(x).unflatten(-1, (self.n, -1)).transpose(1, 2) for n in self.names)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OddAttention(Odd):
    """Its calls cannot be guessed, so that its projections cannot be discovered."""

    def forward(self, x, settings):
        return super().forward(x * settings["scale"])
