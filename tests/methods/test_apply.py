"""oelm.apply: invalid input, initialisation, what is frozen, and schedules."""

import dataclasses
import warnings

import pytest
import torch
from tiny_models import LLAMA, applied_model, build, frozen_layers, optimizer_of
from torch import nn

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.method import Method
from oelm.methods.presets import find_method


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


# -- invalid input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [True, "1", -1, 1.0, None])
def test_a_seed_must_be_a_non_negative_integer(seed):
    with pytest.raises(UsageError, match="seed must be a non-negative integer"):
        oelm.apply(build("bert"), "oelm-freeze", seed=seed)


def test_a_model_without_attention_is_refused():
    with pytest.raises(OelmError, match="found no query and key projections"):
        oelm.apply(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "oelm-freeze")
    with pytest.raises(OelmError, match="no linear layers"):
        oelm.apply(nn.Conv2d(3, 3, 3), "oelm-freeze")


def test_the_error_about_an_unknown_attention_shows_how_to_register_it():
    with pytest.raises(OelmError) as error:
        oelm.apply(nn.ModuleList([OddAttention()]), "oelm-freeze")
    assert "0.alpha: Linear" in str(error.value)
    assert "import oelm" in str(error.value)
    assert f'oelm.register_attention("{__name__}.OddAttention"' in str(error.value)


@pytest.mark.parametrize(
    ("family", "kind", "line", "projections"),
    [
        ("IBert", "IBertSelfAttention", 'q="query", k="key", num_heads="num_attention_heads")', 4),
        ("Lxmert", "LxmertAttentionOutput", "ignore=True)  # if it has no Q and K", 20),
    ],
)
@pytest.mark.usefixtures("no_registrations")
def test_the_lines_of_the_error_work_when_they_are_copied(family, kind, line, projections):
    import transformers

    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    layers = {"l_layers": 2, "r_layers": 2, "x_layers": 2, "num_hidden_layers": 2}
    config = getattr(transformers, f"{family}Config")(**small, **layers)
    model = getattr(transformers, f"{family}Model")(config)
    with pytest.raises(OelmError) as error:
        oelm.apply(model, "oelm-freeze")
    assert f"Tell oelm where {kind} stores its Q and K" in str(error.value)
    lines = [text.strip() for text in str(error.value).splitlines()]
    (copied,) = [text for text in lines if kind in text and text.endswith(line)]
    exec(f"import oelm\n{copied}")
    oelm.apply(model, "oelm-freeze")
    assert len(oelm.qk_projections(model)) == projections
    assert oelm.audit(model).ok


def test_a_partly_recognised_model_is_refused():
    known = Odd(names=("q", "k", "v"))
    known.num_heads = 2
    oelm.qk_projections(known)
    for other in (OddAttention(), Odd(names=("q_proj", "something"))):
        with pytest.raises(
            OelmError, match="does not recognise some attention modules, so nothing was changed"
        ):
            oelm.qk_projections(nn.ModuleList([known, other]))
    holder = OddAttention(names=("q", "k", "qk_gate"))
    holder.num_heads = 2
    with pytest.raises(OelmError, match="qk_gate"):
        oelm.qk_projections(holder)
    runs = Odd(names=("q", "k", "qk_gate"))  # a trial shows that qk_gate makes the values
    runs.num_heads = 2
    assert [p.name for p in oelm.qk_projections(runs)] == ["q", "k"]


@pytest.mark.parametrize("fused", ["in_proj_qkv", "in_proj_qkvz", "kv_b_proj", "qkv"])
def test_queries_and_keys_outside_attention_classes_are_refused(fused):
    """A linear attention whose class name does not say so, beside attentions that are recognised."""

    class Mixer(Odd):
        pass

    known = Odd(names=("q", "k", "v"))
    known.num_heads = 2
    with pytest.raises(OelmError, match=fused):
        oelm.qk_projections(nn.ModuleList([known, Mixer(names=(fused, "out_proj"))]))


def test_matrices_that_are_parameters_are_read_or_refused_beside_other_attention():
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3))

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x @ self.w_q, x @ self.w_k, x @ self.w_v)

    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), Pool())
    with pytest.raises(OelmError, match=r"1\.w_q: Parameter"):
        oelm.apply(model, "oelm-freeze")
    oelm.apply(model, "oelm-freeze", exclude="1")


def test_a_gate_beside_the_queries_trains():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    small = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3NextAttention(Qwen3NextConfig(**small), layer_idx=3)
    oelm.apply(model, "oelm-freeze")
    assert {str(p) for p in oelm.qk_projections(model)} == {
        "q_proj.q (q, 4 heads x 8)",
        "k_proj (k, 2 heads x 8)",
    }
    assert not model.q_proj.q.weight.requires_grad
    assert model.q_proj.rest0.weight.requires_grad
    assert oelm.audit(model).ok


def test_a_wrong_number_of_heads_is_corrected_or_refused():
    model = Odd(names=("q", "k", "v"))
    model.num_heads = 3
    assert [p.num_heads for p in oelm.qk_projections(model)] == [2, 2]
    wrong, nameless = (OddAttention(names=("q", "k", "v")) for _ in range(2))
    wrong.num_heads = 3
    with pytest.raises(OelmError, match="16 rows are not divisible by 3"):
        oelm.apply(wrong, "oelm-freeze")
    with pytest.raises(OelmError, match="number of heads") as error:
        oelm.apply(nameless, "oelm-freeze")
    assert "oelm.register_attention(" in str(error.value)


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


def test_a_method_that_would_freeze_nothing_is_refused():
    nothing = dataclasses.replace(find_method("oelm-partial"), layers=3)
    with pytest.raises(OelmError, match="freeze nothing"):
        oelm.apply(build("bert"), nothing)


def test_a_second_method_is_refused():
    model = build("bert")
    oelm.apply(model, "baseline")
    with pytest.raises(OelmError, match="method 'baseline' was already applied"):
        oelm.apply(model, "oelm-freeze")


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


# -- registering -----------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("no_registrations")
def test_an_ignored_class_around_torchs_attention_or_itself_is_left_as_it_is():
    def frozen(model):
        return {name.split(".")[0] for name, p in model.named_parameters() if not p.requires_grad}

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)

    def model():
        return nn.ModuleDict({"pool": Pool(), "own": build("own-gpt")})

    oelm.register_attention(Pool, ignore=True)
    both = model()
    oelm.apply(both, "oelm-freeze")
    assert frozen(both) == {"own"}
    oelm.register_attention(nn.MultiheadAttention, ignore=True)
    with pytest.raises(OelmError, match="found no query and key"):
        oelm.apply(nn.TransformerEncoderLayer(16, 2), "oelm-freeze")


def test_weights_in_float8_are_refused():
    model = nn.Sequential(Odd(names=("q_proj", "k_proj", "v_proj")))
    model[0].num_heads = 2
    model[0].q_proj.weight = nn.Parameter(model[0].q_proj.weight.data.to(torch.float8_e4m3fn), False)
    with pytest.raises(UsageError, match="quantised"):
        oelm.apply(model, "oelm-freeze", verify=False)


def test_a_registered_attention_is_recognised():
    class Registered(Odd):
        pass

    oelm.register_attention(Registered, q="alpha", k="beta", num_heads="n")
    model = nn.ModuleList([Registered(), Registered()])
    applied = oelm.apply(model, "oelm-freeze")
    assert applied.frozen == 2 * 2 * (16 * 16 + 16)

    class Pooling(OddAttention):
        pass

    oelm.register_attention(Pooling, ignore=True)
    oelm.apply(nn.ModuleList([Registered(), Pooling()]), "oelm-freeze")

    class Misfit(Odd):
        pass

    oelm.register_attention(f"{__name__}.{Misfit.__qualname__}", q="nowhere", k="beta", num_heads="n")
    with pytest.raises(OelmError, match="has no attribute 'nowhere'"):
        oelm.apply(Misfit(), "oelm-freeze")
    for wrong in ({"q": "alpha"}, {}, {"fused": "x", "layout": "diagonal"}):
        with pytest.raises(UsageError):
            oelm.register_attention(Misfit, **wrong)


# -- initialisation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2.0, 0, True])
def test_registering_a_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(UsageError, match="num_heads must be the name of an attribute or a positive integer"):
        oelm.register_attention(Odd, q="alpha", k="beta", num_heads=size)


def test_the_same_seed_gives_the_same_tensors_and_q_differs_from_k():
    first, second, other = (applied_model("bert", seed=seed) for seed in (1, 1, 2))
    a, b, c = ([p.heads() for p in oelm.qk_projections(m)] for m in (first, second, other))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(a, c, strict=True))
    assert len({x.flatten()[0].item() for x in a}) == len(a)


def test_apply_does_not_touch_the_global_random_generator():
    model = build("gpt2")
    state = torch.get_rng_state()
    oelm.apply(model, "oelm-freeze", seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_gain_match_keeps_the_norm_of_each_head():
    model = build("gpt-neox")
    before = [p.heads().flatten(1).norm(dim=1) for p in oelm.qk_projections(model)]
    oelm.apply(model, "oelm-pretrained")
    after = [p.heads().flatten(1).norm(dim=1) for p in oelm.qk_projections(model)]
    assert all(torch.allclose(x, y, rtol=1e-5) for x, y in zip(before, after, strict=True))


def test_discarding_pretrained_weights_gives_a_warning(tmp_path):
    model = build("bert")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="freeze-pretrained"):
        oelm.apply(loaded, "oelm-freeze")
    with pytest.warns(UserWarning, match="replaces the trained FFN weights"):
        oelm.apply(type(model).from_pretrained(tmp_path), "oelm-ffn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        oelm.apply(type(model).from_pretrained(tmp_path), "oelm-pretrained")
        oelm.apply(type(model).from_pretrained(tmp_path), "freeze-pretrained")
        oelm.apply(build("bert"), "oelm-freeze")  # it was not loaded from a checkpoint


# -- freezing and schedules ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freeze", "n", "layers"), [("first", 1, {0}), ("first", 9, {0, 1, 2}), ("all-but-last", 1, {0, 1})]
)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_first_and_all_but_last_choose_the_right_layers(family, freeze, n, layers):
    model = build(family)
    oelm.apply(model, Method("mine", init="headwise", freeze=freeze, layers=n))
    assert {layer for _, layer in frozen_layers(model)} == layers


def test_encoder_and_decoder_count_their_own_layers():
    model = build("bart")
    oelm.apply(model, Method("mine", freeze="first", layers=1))
    assert frozen_layers(model) == {("model.encoder.layers", 0), ("model.decoder.layers", 0)}
    cross = [p for p in oelm.qk_projections(model) if "encoder_attn" in p.name and p.place.layer == 0]
    assert cross
    assert not any(p.weight.parameter.requires_grad for p in cross)


def test_keys_alone_can_be_frozen():
    model = build("gpt2")
    oelm.apply(model, Method("keys", init="headwise", parts=("k",), freeze="all"))
    for p in oelm.qk_projections(model):
        assert p.weight.parameter.requires_grad == (p.role == "q")
    assert oelm.audit(model).ok


def test_tensors_that_the_user_froze_stay_frozen():
    model = build("gpt2")
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    applied = oelm.apply(model, "oelm-freeze")
    assert applied.trainable == model.lm_head.weight.numel()
    assert oelm.audit(model).ok


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-early"])
def test_no_schedule_trains_what_the_user_froze(name, tmp_path):
    model = build("llama")
    frozen = model.model.layers[0].requires_grad_(False).self_attn.q_proj.weight
    applied = oelm.apply(model, name)
    optimizer = optimizer_of(model)
    assert frozen not in {p for group in optimizer.param_groups for p in group["params"]}
    oelm.save(model, tmp_path)
    for run in (applied, oelm.Applied(oelm.load(tmp_path))):
        for done in range(11):
            run.step(done, 10)
            assert not run.model.model.layers[0].self_attn.q_proj.weight.requires_grad
            assert oelm.audit(run.model).ok


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "torch-encoder"])
def test_splitting_a_fused_tensor_keeps_requires_grad_of_v(family):
    """If only biases train (BitFit), or only matrices, then V's part of a fused tensor does the same."""
    for trained in ("bias", "weight"):
        model = build(family)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        oelm.apply(model, "oelm-freeze")
        qk = {
            id(window.parameter)
            for p in oelm.qk_projections(model)
            for window in (p.weight, p.bias)
            if window is not None
        }
        rest = {n: p.requires_grad for n, p in model.named_parameters() if id(p) not in qk}
        assert rest == {name: name.endswith(trained) for name in rest}
