"""Models that `oelm.apply` refuses, because a method cannot be applied correctly to one of their layers."""

import pytest
import torch
from tiny_models import LLAMA, Odd, build, frozen_layers
from torch import nn

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.method import Method


def test_heads_larger_than_the_width_are_refused_before_anything_changes():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 1
            self.q, self.k = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x):
            return (self.q(x) @ self.k(x).mT).softmax(-1) @ x

    model = Wide()
    before = model.q.weight.clone()
    with pytest.raises(OelmError, match="cannot have orthonormal rows"):
        oelm.apply(model, "oelm-freeze")
    assert torch.equal(model.q.weight, before)
    oelm.apply(model, "oelm-random-matched")


def test_a_tied_projection_is_not_frozen_by_accident():
    model = build("llama")
    model.model.layers[0].self_attn.q_proj.weight = model.model.layers[0].self_attn.o_proj.weight
    with pytest.raises(OelmError, match="tied"):
        oelm.apply(model, "oelm-freeze")


def test_a_projection_that_two_layers_share_is_refused():
    layers = nn.ModuleList(Odd(names=("q_proj", "k_proj", "v_proj")) for _ in range(3))
    for layer in layers:
        layer.num_heads = 2
    model = nn.Sequential(*layers)
    model[2].k_proj = model[0].k_proj
    with pytest.raises(UsageError, match=r"0\.k_proj and 2\.k_proj are one module"):
        oelm.apply(model, "oelm-freeze")
    shared = nn.Sequential(*[layers[1]] * 3)
    shared.alias = shared[0]
    assert oelm.apply(shared, "oelm-freeze").qk_trainable == 0


def repeated(*order):
    """Return a model in whose list of layers the layer A, B or C is at each place that the letters name."""
    layers = {letter: Odd(names=("q_proj", "k_proj", "v_proj")) for letter in order}
    for layer in layers.values():
        layer.num_heads = 2
    return nn.ModuleDict({"layers": nn.Sequential(*(layers[letter] for letter in order))})


@pytest.mark.parametrize("name", ["oelm-partial", "oelm-gradual", "oelm-plus"])
def test_a_layer_at_several_places_that_a_method_treats_differently_is_refused(name):
    model = repeated(*"ABA")
    with pytest.raises(UsageError, match=rf"layers\.0 and layers\.2 are one layer, but '{name}'"):
        oelm.apply(model, name)
    assert all(p.requires_grad for p in model.parameters())
    model["alias"] = model["layers"][0]  # another name is not another place
    assert oelm.apply(model, "oelm-freeze").qk_trainable == 0


def test_every_place_of_a_repeated_layer_counts():
    model = repeated(*"AABC")
    oelm.apply(model, Method("mine", init="headwise", freeze="first", layers=2))
    assert frozen_layers(model) == {("layers", 0)}


@pytest.mark.parametrize("outside", [True, False])
def test_a_projection_that_is_also_another_module_is_refused(outside):
    attention = Odd(names=("q_proj", "k_proj", "v_proj"))
    attention.num_heads = 2
    model = nn.ModuleDict({"attn": attention})
    if outside:
        model = nn.ModuleDict({"embed": attention.q_proj, "attn": attention})
    else:
        attention.out = attention.q_proj
    other = "embed" if outside else "attn.out"
    with pytest.raises(UsageError, match=rf"attn\.q_proj and {other} are one module"):
        oelm.apply(model, "oelm-freeze", verify=False)
    assert attention.q_proj.weight.requires_grad


def test_meta_tensors_and_parametrized_weights_are_refused():
    with torch.device("meta"):
        model = build("bert")
    assert oelm.apply(model, "baseline").frozen == 0  # counting parameters needs no weights
    with torch.device("meta"), pytest.raises(OelmError, match="meta device"):
        oelm.apply(build("bert"), "oelm-freeze")
    normed = build("llama")
    nn.utils.parametrizations.weight_norm(normed.model.layers[1].self_attn.k_proj)
    with pytest.raises(OelmError, match=r"layers\.1\.self_attn\.k_proj: the weight is computed"):
        oelm.apply(normed, "oelm-freeze")


@pytest.mark.parametrize("name", ["oelm-pretrained", "oelm-pretrained-polar"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_dependent_rows_are_refused_before_anything_changes(family, name):
    model = build(family)
    last = oelm.qk_projections(model)[-1]
    last.weight.view().zero_()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(OelmError, match=rf"{last.name}: .*dependent"):
        oelm.apply(model, name)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == dict.fromkeys(before, True)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_extras_are_refused_where_the_attention_does_not_support_them():
    for family, name, word in [
        ("bert", "oelm-conv", "causal"),
        ("t5", "oelm-conv", "causal"),
        ("torch-encoder", "oelm-lowrank", "without extras"),
        ("gpt2", "oelm-relative", "relative bias"),
    ]:
        model = build(family)
        before = {n: p.clone() for n, p in model.named_parameters()}
        with pytest.raises(OelmError, match=word):
            oelm.apply(model, name)
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_a_temperature_that_a_norm_of_the_queries_cancels_is_refused():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Llama4ForCausalLM, Llama4TextConfig

    experts = {"intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": [], "head_dim": 8}
    llama = Llama4ForCausalLM(Llama4TextConfig(**LLAMA, **experts, no_rope_layers=[1, 1, 1]))
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    shape = {**LLAMA, **sizes, "v_head_dim": 8, "first_k_dense_replace": 3, "num_key_value_heads": 4}
    for model in (llama, DeepseekV3ForCausalLM(DeepseekV3Config(**shape))):
        with pytest.raises(UsageError, match="temperature would have no effect"):
            oelm.apply(model, "oelm-temperature")


def test_a_temperature_that_cosine_attention_cancels_is_refused():
    from transformers import Swinv2Config, Swinv2Model

    shape = {"image_size": 16, "patch_size": 4, "window_size": 2, "embed_dim": 16}
    model = Swinv2Model(Swinv2Config(**shape, depths=[2, 2], num_heads=[2, 4]))
    with pytest.raises(UsageError, match=r"normalises .* \(logit_scale\), so the temperature would have no"):
        oelm.apply(model, "oelm-temperature")
    assert oelm.apply(model, "oelm-freeze").qk_trainable == 0


class ScaledLinear(nn.Linear):
    """As in quantised layers, the matrix that it multiplies by is not its weight alone."""

    scale = 2.0

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def test_a_layer_that_computes_something_else_is_not_replaced_by_a_linear_one():
    odd = Odd(names=("query", "key", "value"))
    odd.query, odd.key = ScaledLinear(16, 16), ScaledLinear(16, 16)
    model = nn.Sequential(odd)
    with pytest.raises(UsageError, match="its class ScaledLinear computes something else"):
        oelm.apply(model, "oelm-lowrank")
    assert type(odd.query) is ScaledLinear
    odd.query.scale = odd.key.scale = 1.0  # computes W x + b, though in a function of its own
    oelm.apply(model, "oelm-lowrank")


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank adapter that is zero at first, as in loralib."""

    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, d_in)), nn.Parameter(torch.zeros(d_out, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


def test_an_adapter_in_a_subclass_of_linear_is_neither_lost_nor_trained():
    model = nn.Sequential(Odd(names=("q_proj", "k_proj", "v_proj")))
    model[0].num_heads = 2
    model[0].q_proj = LoraLinear(16, 16)
    with pytest.raises(UsageError, match="its class LoraLinear"):
        oelm.apply(model, "oelm-bias", verify=False)
    with pytest.raises(OelmError, match="lora_a affects only the attention scores") as error:
        oelm.apply(model, "oelm-freeze")
    assert "q_proj is a LoraLinear with parameters of its own (lora_a, lora_b)" in str(error.value)
    assert "register_attention" not in str(error.value)  # it would not help


def test_weights_in_float8_are_refused():
    model = nn.Sequential(Odd(names=("q_proj", "k_proj", "v_proj")))
    model[0].num_heads = 2
    model[0].q_proj.weight = nn.Parameter(model[0].q_proj.weight.data.to(torch.float8_e4m3fn), False)
    with pytest.raises(UsageError, match="quantised"):
        oelm.apply(model, "oelm-freeze", verify=False)
