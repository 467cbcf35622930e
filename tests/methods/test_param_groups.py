"""Parameter groups: each parameter once, with the right learning rate and weight decay."""

import dataclasses

import pytest
import torch
from tiny_models import FAMILIES, LLAMA, build, outputs

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.presets import find_method


def by_name(model, groups):
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)]: group for group in groups for p in group["params"]}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in FAMILIES for name in ("oelm-freeze", "oelm-gradual")),
        *((family, name) for family in ("bert", "gpt2", "t5") for name in ("baseline", "oelm-early")),
    ],
)
def test_every_tensor_that_ever_trains_is_in_exactly_one_group(family, name):
    model = build(family)
    oelm.apply(model, name)
    groups = oelm.param_groups(model, lr=1e-3, weight_decay=0.1)
    listed = [id(p) for g in groups for p in g["params"]]
    assert len(listed) == len(set(listed))
    stays_frozen = name == "oelm-freeze"
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad or not stays_frozen}


def test_matrices_decay_but_biases_norms_and_identity_inits_do_not():
    model = build("own-gpt")
    oelm.apply(
        model,
        dataclasses.replace(
            find_method("oelm-plus"), name="all", conv=4, core=True, temperature=True, relative_bias=4
        ),
    )
    groups = by_name(model, oelm.param_groups(model, lr=1e-3, weight_decay=0.1))
    decaying = {n for n, g in groups.items() if g["weight_decay"]}
    assert "blocks.0.attn.v.weight" in decaying
    assert "blocks.0.attn.q.lowrank_a" in decaying
    for still in (
        "mlp.up.bias",
        "norm1.weight",
        "attn.q.extra_bias",
        "attn.q.conv",
        "attn.q.core",
        "attn.q.temperature",
        "attn.relative_bias",
    ):
        assert f"blocks.0.{still}" in groups
        assert f"blocks.0.{still}" not in decaying


def test_layer_decay_lowers_the_learning_rate_towards_the_embedding():
    model = build("bert")
    oelm.apply(model, "baseline")
    rates = {n: g["lr"] for n, g in by_name(model, oelm.param_groups(model, lr=1.0, layer_decay=0.5)).items()}
    assert rates["classifier.weight"] == 1.0
    assert rates["bert.encoder.layer.2.output.dense.weight"] == 0.5
    assert rates["bert.encoder.layer.0.attention.self.query.weight"] == 0.125
    assert rates["bert.embeddings.word_embeddings.weight"] == 0.0625


def test_layer_decay_counts_encoder_and_decoder_separately():
    model = build("bart")
    rates = {n: g["lr"] for n, g in by_name(model, oelm.param_groups(model, lr=1.0, layer_decay=0.5)).items()}
    for stack in ("encoder", "decoder"):
        assert rates[f"model.{stack}.layers.1.fc1.weight"] == 0.5
        assert rates[f"model.{stack}.layers.0.fc1.weight"] == 0.25
        assert rates[f"model.{stack}.embed_positions.weight"] == 0.125
    assert rates["model.shared.weight"] == 0.125


def test_layer_decay_counts_layers_without_attention():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    kinds = ["conv", "full_attention", "conv", "full_attention"]
    model = Lfm2ForCausalLM(Lfm2Config(**{**LLAMA, "num_hidden_layers": 4}, layer_types=kinds))
    rates = {n: g["lr"] for n, g in by_name(model, oelm.param_groups(model, lr=1.0, layer_decay=0.5)).items()}
    for layer in range(4):
        assert rates[f"model.layers.{layer}.feed_forward.w1.weight"] == 0.5 ** (4 - layer)
    assert rates["model.layers.2.conv.in_proj.weight"] == 0.25
    assert rates["model.embed_tokens.weight"] == 0.5**5


def test_layer_decay_treats_a_convolutional_front_end_like_an_embedding():
    from transformers import WhisperConfig, WhisperModel

    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "vocab_size": 50}
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 2, "decoder_layers": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = WhisperModel(WhisperConfig(**heads, **sizes, **ids))
    rates = {n: g["lr"] for n, g in by_name(model, oelm.param_groups(model, lr=1.0, layer_decay=0.5)).items()}
    assert rates["encoder.conv1.weight"] == rates["encoder.conv2.bias"] == 0.125
    assert rates["decoder.embed_tokens.weight"] == 0.125
    assert rates["encoder.layers.0.fc1.weight"] == rates["decoder.layers.0.fc1.weight"] == 0.25
    assert rates["encoder.layer_norm.weight"] == rates["decoder.layer_norm.weight"] == 1.0


def test_layer_decay_gives_a_part_between_stages_the_learning_rate_of_the_layer_before():
    from transformers import SwinConfig, SwinForImageClassification

    shape = {"image_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 16, "num_labels": 2}
    model = SwinForImageClassification(SwinConfig(**shape, depths=[2, 2], num_heads=[2, 4]))
    rates = {n: g["lr"] for n, g in by_name(model, oelm.param_groups(model, lr=1.0, layer_decay=0.5)).items()}
    stages = "swin.encoder.layers"
    assert rates[f"{stages}.0.blocks.0.mlp.fc1.weight"] == 0.5**4
    assert rates[f"{stages}.0.blocks.1.mlp.fc1.weight"] == 0.5**3
    assert rates[f"{stages}.0.downsample.reduction.weight"] == 0.5**3  # as in SimMIM
    assert rates[f"{stages}.1.blocks.1.mlp.fc1.weight"] == 0.5
    assert rates["swin.embeddings.patch_embeddings.projection.weight"] == 0.5**5
    assert rates["classifier.weight"] == rates["swin.layernorm.weight"] == 1.0


def test_q_and_k_that_thaw_have_their_own_learning_rate():
    model = build("gpt2")
    oelm.apply(model, "oelm-gradual")
    groups = by_name(model, oelm.param_groups(model, lr=1e-3, qk_lr=1e-5))
    for name, group in groups.items():
        assert group["lr"] == (1e-5 if ".c_attn.q." in name or ".c_attn.k." in name else 1e-3)


def test_biases_and_adapters_of_q_and_k_have_their_learning_rate_and_only_adapters_decay():
    model = build("gpt-neox")
    oelm.apply(model, "oelm-plus")
    groups = by_name(model, oelm.param_groups(model, lr=1e-3, qk_lr=1e-5, weight_decay=0.1))
    extras = {name: g for name, g in groups.items() if ".q." in name or ".k." in name}
    assert {name.rpartition(".")[2] for name in extras} == {"lowrank_a", "lowrank_b", "extra_bias"}
    for name, group in groups.items():
        assert group["lr"] == (1e-5 if name in extras else 1e-3)
    for name, group in extras.items():
        assert group["weight_decay"] == (0.0 if name.endswith("extra_bias") else 0.1)


def test_a_learning_rate_for_a_fused_q_is_refused():
    model = build("gpt2")
    oelm.apply(model, "baseline")
    with pytest.raises(OelmError, match="shares one tensor with V"):
        oelm.param_groups(model, lr=1e-3, qk_lr=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"lr": 1.0, "layer_decay": 0.0}, {"lr": 1.0, "weight_decay": -1.0}]
)
def test_invalid_learning_rates_and_decays_are_refused(wrong):
    with pytest.raises(UsageError):
        oelm.param_groups(build("bert"), **wrong)


def test_groups_work_with_other_optimizers_and_without_a_method():
    model = build("bert")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(oelm.param_groups(model, lr=0.1, weight_decay=0.1), momentum=0.9)
    outputs(model).square().mean().backward()
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved >= {n for n, p in model.named_parameters() if p.dim() > 1 and p.grad is not None}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)
