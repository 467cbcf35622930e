"""Every model family: Q/K are found and frozen, the rest trains, and state dicts stay compatible."""

import pytest
import torch
from tiny_models import (
    ENCODER,
    FAMILIES,
    LLAMA,
    applied_model,
    build,
    equal_parameters,
    optimizer_of,
    outputs,
)
from torch import nn
from transformers import PreTrainedModel

import oelm
from oelm.methods.orthogonal import orthonormality_error

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
families = pytest.mark.parametrize("family", FAMILIES)


def step(model):
    """Take one AdamW step with weight decay; return the optimizer."""
    optimizer = optimizer_of(model)
    model.train()
    outputs(model).square().mean().backward()
    optimizer.step()
    return optimizer


@families
def test_every_projection_is_found_with_its_layer(family):
    projections = oelm.qk_projections(build(family))
    assert len(projections) == FAMILIES[family].projections
    assert {p.role for p in projections} == {"q", "k"}
    assert len({(p.place.stack, p.place.layer) for p in projections}) == FAMILIES[family].layers
    for p in projections:
        heads, head_dim, _ = p.heads().shape
        assert (heads, head_dim) == (p.num_heads, p.head_dim)


@families
@torch.no_grad()
def test_projections_are_q_and_k_of_the_right_head(family):
    """If a query head is zero, its scores are zero, so its keys cannot change the output.

    This fails if rows of v are taken for k, or rows of one head for another's.
    """
    model, generator = build(family), torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # with the usual small init, attention hardly changes the output
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.3, generator=generator)
    projections = oelm.qk_projections(model)
    queries, keys = ([p for p in projections if p.role == role] for role in "qk")
    kv_head = keys[0].num_heads - 1
    for q in queries:
        per_group = q.num_heads // keys[0].num_heads
        for window in (q.weight, q.bias):
            if window is not None:
                heads = window.view().clone().reshape(q.num_heads, q.head_dim, -1)
                heads[kv_head * per_group : (kv_head + 1) * per_group] = 0
                window.write(heads)
    without_head = outputs(model)
    for k in keys:
        heads = k.heads().clone()
        heads[kv_head] = torch.randn(heads[kv_head].shape, generator=generator)
        k.weight.write(heads)
    assert torch.allclose(outputs(model), without_head, **CLOSE)
    if keys[0].num_heads > 1:  # the other heads do change the output
        for k in keys:
            k.weight.write(torch.randn(k.heads().shape, generator=generator))
        assert not torch.allclose(outputs(model), without_head, **CLOSE)


@families
def test_baseline_changes_nothing(family):
    model = build(family)
    before, state = outputs(model), {k: v.clone() for k, v in model.state_dict().items()}
    applied = oelm.apply(model, "baseline", seed=3)
    assert torch.equal(outputs(model), before)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert applied.frozen == 0
    assert applied.qk_trainable == applied.qk_total > 0


@families
def test_frozen_tensors_stay_bit_equal_while_the_rest_trains(family):
    model = build(family)
    applied = oelm.apply(model, "oelm-freeze", seed=3)
    assert max(orthonormality_error(p.heads()) for p in oelm.qk_projections(model)) < 1e-5
    assert applied.qk_trainable == 0
    assert applied.frozen == applied.qk_total

    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    training = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = step(model)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    assert all(after[name].grad is None for name in frozen)
    assert not any(p in optimizer.state for p in (after[name] for name in frozen))
    used = {n for n in training if after[n].grad is not None and after[n].grad.abs().sum() > 0}
    assert all(not torch.equal(after[n], training[n]) for n in used)
    assert len(used) > len(training) / 2
    assert oelm.audit(model, optimizer).ok

    # In each attention with frozen Q/K, other parameters (values, output) get a gradient.
    prefixes = {p.attention_name for p in oelm.qk_projections(model)}
    assert all(any(n.startswith(prefix) for n in used) for prefix in prefixes)


@families
def test_random_inits_zero_the_biases_and_keep_keeps_them(family):
    model = build(family)
    kept = [None if p.bias is None else p.bias.view().clone() for p in oelm.qk_projections(model)]
    oelm.apply(model, "freeze-pretrained")
    for p, bias in zip(oelm.qk_projections(model), kept, strict=True):
        assert bias is None or torch.equal(p.bias.view().flatten(), bias.flatten())
        assert bias is None or not p.bias.parameter.requires_grad
    drawn = applied_model(family, "oelm-random")
    assert all(p.bias is None or not p.bias.view().any() for p in oelm.qk_projections(drawn))


@families
def test_a_split_model_computes_the_same_as_the_plain_one(family):
    """The state dict after apply fits the plain model, which then gives the same outputs."""
    plain, model = build(family), build(family)
    shapes = {k: v.shape for k, v in plain.state_dict().items()}
    oelm.apply(model, "oelm-freeze", seed=3)
    state = model.state_dict()
    assert {k: v.shape for k, v in state.items()} == shapes
    plain.load_state_dict(state)
    assert torch.allclose(outputs(model), outputs(plain), **CLOSE)
    with torch.no_grad():  # torch's fused inference kernels
        assert torch.allclose(outputs(model), outputs(plain), **CLOSE)
    again = applied_model(family, seed=4)
    again.load_state_dict(plain.state_dict())
    assert equal_parameters(again, model)


@pytest.mark.parametrize("family", ["gpt2-cross", "gpt-neox", "modernbert", "phi3", "falcon", "t5", "vit"])
def test_save_pretrained_loads_in_plain_transformers(family, tmp_path):
    model = applied_model(family)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert isinstance(plain, PreTrainedModel)
    assert torch.allclose(outputs(plain), outputs(model), **CLOSE)


@families
def test_ffn_methods_freeze_the_ffn(family):
    model = build(family)
    if family.startswith("torch-attention") or family == "squeezebert":  # its FFN is made of convolutions
        with pytest.raises(oelm.OelmError, match="no feed-forward"):
            oelm.apply(model, "oelm-ffn")
        return
    applied = oelm.apply(model, "oelm-ffn", seed=1)
    assert applied.qk_trainable == applied.qk_total
    assert 0 < applied.frozen < applied.total / 2 + applied.total / 4
    assert oelm.audit(model, step(model)).ok


def test_ffn_methods_refuse_experts_that_they_cannot_freeze():
    """The shared expert of each layer is a usual FFN; the others are in one tensor."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    moe = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**LLAMA, **moe))
    with pytest.raises(oelm.OelmError, match="several experts in one tensor"):
        oelm.apply(model, "oelm-ffn")
    oelm.apply(model, "oelm-ffn", exclude="*.experts")
    assert not model.model.layers[0].mlp.shared_expert.up_proj.weight.requires_grad


def test_bert_base_has_the_parameter_counts_of_the_original_study():
    from transformers import BertConfig, BertForSequenceClassification

    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(num_labels=3))
    assert sum(p.numel() for p in model.parameters()) == 109_484_547
    model = model.to_empty(device="cpu")
    nn.init.zeros_(model.classifier.weight)
    applied = oelm.apply(model, "oelm-freeze", seed=42)
    assert (applied.total, applied.frozen, applied.trainable) == (109_484_547, 14_174_208, 95_310_339)
    assert "14,174,208" in str(applied)


def test_torch_encoders_work_with_padding_on_the_fast_path():
    model, plain = applied_model("torch-encoder"), build("torch-encoder")
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 32)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    with torch.no_grad():
        got, want = (m(x, src_key_padding_mask=padding) for m in (model, plain))
    assert torch.allclose(got[~padding], want[~padding], **CLOSE)


def test_ffn_methods_act_on_the_layers_with_attention():
    from transformers import Lfm2Config, Lfm2ForCausalLM, MobileBertConfig, MobileBertModel

    kinds = ["conv", "conv", "full_attention", "full_attention"]
    shape = {**LLAMA, "num_hidden_layers": 4, "block_auto_adjust_ff_dim": False}
    model = Lfm2ForCausalLM(Lfm2Config(**shape, layer_types=kinds))
    oelm.apply(model, "oelm-qk-ffn")
    trains = [layer.feed_forward.w1.weight.requires_grad for layer in model.model.layers]
    assert trains == [True, True, False, False]

    bottleneck = {"intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 16}
    model = MobileBertModel(MobileBertConfig(**ENCODER, **bottleneck))
    oelm.apply(model, "oelm-ffn")
    for layer in model.encoder.layer:
        for block in (layer, *layer.ffn):
            assert not block.intermediate.dense.weight.requires_grad


def test_all_experts_of_a_layer_are_frozen():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.experts = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in range(3)
            )

    model = nn.Sequential(Layer(), Layer())
    oelm.apply(model, "oelm-ffn")
    assert not any(p.requires_grad for name, p in model.named_parameters() if "experts" in name)
