"""Numeric verification: wrong claims about Q and K are refused, right ones accepted."""

import pytest
import torch
import transformers as hf
from tiny_models import LLAMA, build
from torch import nn
from torch.nn import functional as F

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.reading.find import qk_projections
from oelm.methods.reading.verify import verify_attention

W, H = 32, 4
pytestmark = pytest.mark.usefixtures("no_registrations")


class MHSA(nn.Module):
    """An attention with an unusual class name and plural projection names."""

    def __init__(self, names=("to_queries", "to_keys", "to_values")):
        super().__init__()
        self.num_heads, self.names = H, names
        for name in names:
            setattr(self, name, nn.Linear(W, W))

    def forward(self, x):
        q, k, v = (getattr(self, n)(x).unflatten(-1, (H, -1)).transpose(1, 2) for n in self.names)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Interleaved(nn.Module):
    """One matrix whose rows are ordered [q1; k1; v1; q2; ...]."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.mix = nn.Linear(W, 3 * W)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (H, -1)).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def frozen(model):
    oelm.apply(model, "freeze-pretrained")
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def test_scores_minus_their_maximum_are_accepted():
    """GPT-OSS subtracts the maximum of each query's scores before the softmax."""

    class ShiftedAttention(MHSA):
        def forward(self, x):
            q, k, v = (getattr(self, n)(x).unflatten(-1, (H, -1)).transpose(1, 2) for n in self.names)
            scores = q @ k.mT * q.shape[-1] ** -0.5
            weights = (scores - scores.amax(-1, keepdim=True)).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2)

    for names in (("to_queries", "to_keys", "to_values"), ("a", "b", "c")):
        model = nn.ModuleDict({"own": ShiftedAttention(names), "torch": nn.MultiheadAttention(W, H)})
        assert {f"own.{name}.weight" for name in names[:2]} < frozen(model)
    model = nn.ModuleDict({"own": ShiftedAttention(), "torch": nn.MultiheadAttention(W, H)})
    oelm.register_attention(ShiftedAttention, q="to_keys", k="to_queries")
    with pytest.raises(OelmError, match="act as"):
        frozen(model)


# -- projections that are easy to miss -------------------------------------------------------------------


def test_plural_names_are_recognised_beside_torchs_attention():
    model = nn.ModuleDict({"own": MHSA(), "torch": nn.MultiheadAttention(W, H)})
    assert {"own.to_queries.weight", "own.to_keys.weight"} < frozen(model)


def test_projections_with_unusual_names_are_discovered():
    model = nn.ModuleDict({"own": MHSA(names=("a", "b", "c")), "torch": nn.MultiheadAttention(W, H)})
    assert {"own.a.weight", "own.a.bias", "own.b.weight", "own.b.bias"} < frozen(model)
    assert {str(p) for p in qk_projections(model["own"])} == {"a (q, 4 heads x 8)", "b (k, 4 heads x 8)"}


def test_a_class_named_attention_that_cannot_be_run_is_refused():
    class BrokenAttention(MHSA):
        def forward(self, x):
            raise NotImplementedError

    model = nn.ModuleDict(
        {"own": BrokenAttention(names=("a", "b", "c")), "torch": nn.MultiheadAttention(W, H)}
    )
    with pytest.raises(OelmError, match=r"own\.a: Linear") as error:
        oelm.apply(model, "oelm-freeze")
    assert '.BrokenAttention"' in str(error.value)


def test_a_position_key_with_an_unusual_name_is_frozen():
    class Relative(MHSA):
        def __init__(self):
            super().__init__(names=("q", "k", "v"))
            self.place = nn.Linear(W, W)

        def forward(self, x):
            q, k, v = (getattr(self, n)(x).unflatten(-1, (H, -1)).transpose(1, 2) for n in self.names)
            place = self.place(torch.ones_like(x)).unflatten(-1, (H, -1)).transpose(1, 2)
            return ((q @ (k + place).mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    assert "place.weight" in frozen(Relative())


def conformer(kind, **rest):
    config = getattr(hf, f"{kind}Config")(
        hidden_size=W,
        num_attention_heads=H,
        num_hidden_layers=1,
        intermediate_size=W,
        position_embeddings_type="relative",
        conv_dim=(W,),
        conv_stride=(2,),
        conv_kernel=(3,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        **rest,
    )
    return getattr(hf, f"{kind}Model")(config)


def funnel():
    sizes = {"d_model": W, "n_head": H, "d_head": 8, "d_inner": W, "block_sizes": [1], "vocab_size": 64}
    return hf.FunnelBaseModel(hf.FunnelConfig(**sizes))


def xlnet():
    return hf.XLNetModel(hf.XLNetConfig(d_model=W, n_head=H, n_layer=1, d_inner=W, vocab_size=64))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: conformer("Wav2Vec2Conformer"), "linear_pos.weight"),
        (funnel, "r_kernel"),
        (xlnet, "rel_attn.r"),
    ],
)
def test_position_keys_are_frozen_and_audited(make, name):
    model = make()
    names = frozen(model)
    assert any(n.endswith(name) for n in names)
    assert oelm.audit(model).ok
    drawn = make()
    oelm.apply(drawn, "oelm-freeze", seed=1)
    assert oelm.audit(drawn).ok


def test_convolutions_are_read_as_projections():
    class ConvAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 1
            self.q, self.k, self.v = (nn.Conv2d(W, W, 1) for _ in range(3))

        def forward(self, x):
            q, k, v = (p(x).flatten(2).mT for p in (self.q, self.k, self.v))
            return (q @ k.mT).softmax(-1) @ v

    model = nn.ModuleDict({"conv": ConvAttention(), "torch": nn.MultiheadAttention(W, H)})
    oelm.apply(model, "oelm-freeze", seed=1)
    assert oelm.audit(model).ok
    assert not model["conv"].k.weight.requires_grad


# -- discovered by running the module --------------------------------------------------------------------


class PoolingAttention(nn.Module):
    """One learned query; keys and values of the tokens."""

    def __init__(self):
        super().__init__()
        self.token, self.one, self.two = nn.Parameter(torch.randn(1, 1, W)), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (H, -1)).transpose(1, 2)
            for t in (self.token.expand(len(x), 2, W), self.one(x), self.two(x))
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class LinearAttention(nn.Module):
    """Attention without scores; with `weigh`, the scores are hidden from the search for a softmax."""

    def __init__(self, weigh=None):
        super().__init__()
        self.num_heads, self.qkv, self.weigh = H, nn.Linear(W, 3 * W), weigh

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        return (scores if self.weigh is None else self.weigh(scores)) @ v


class HiddenSoftmax(torch.autograd.Function):
    """A softmax whose input has no gradient while it is computed, as in DeBERTa's first code."""

    @staticmethod
    def forward(ctx, scores):
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, gradient):
        (weights,) = ctx.saved_tensors
        return weights * (gradient - (gradient * weights).sum(-1, keepdim=True))


def test_keys_of_a_learned_query_are_frozen():
    assert frozen(PoolingAttention()) == {"one.weight", "one.bias"}


def test_an_indexer_that_selects_tokens_is_not_part_of_q_and_k():
    if not hasattr(hf, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek-V3.2")
    names = frozen(latent_attention("DeepseekV32", index_n_heads=2, index_head_dim=8, index_topk=4))
    assert any(n.endswith("kv_b_proj.k.weight") for n in names)
    assert not any("indexer" in n for n in names)


def test_linear_attention_is_left_alone_with_a_warning():
    model = nn.ModuleDict({"linear": LinearAttention(), "own": MHSA()})
    with pytest.warns(UserWarning, match="1 modules of linear attention"):
        names = frozen(model)
    assert {name.partition(".")[0] for name in names} == {"own"}


def test_a_model_with_linear_attention_alone_has_nothing_to_freeze():
    refused(nn.ModuleList([LinearAttention()]), "has only linear attention")


@pytest.mark.parametrize("weigh", [torch.exp, torch.sigmoid, torch.relu, HiddenSoftmax.apply])
def test_scores_without_a_softmax_are_refused(weigh):
    refused(nn.ModuleDict({"linear": LinearAttention(weigh), "own": MHSA()}), r"linear\.qkv: Linear")


# -- wrong registrations ---------------------------------------------------------------------------------


def refused(model, match):
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(OelmError, match=match):
        oelm.apply(model, "oelm-freeze")
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in model.named_parameters())


def test_a_wrong_layout_is_refused():
    oelm.register_attention(Interleaved, fused="mix", layout="block", num_heads="num_heads")
    refused(Interleaved(), "rows of mix.weight that are read as queries affect the output")
    oelm.register_attention(Interleaved, fused="mix", layout="per-head", num_heads="num_heads")
    oelm.apply(Interleaved(), "oelm-freeze")


def test_a_wrong_layout_of_codegen_is_refused():
    model = build("codegen")
    kind = type(next(p.attention for p in qk_projections(model)))
    oelm.register_attention(kind, fused="qkv_proj", layout="block", num_heads="num_attention_heads")
    refused(model, "CodeGenAttention")


@pytest.mark.parametrize(
    ("heads", "why"), [(8, "affect the same scores"), (2, "affect the scores of several heads")]
)
def test_a_wrong_number_of_heads_is_refused(heads, why):
    oelm.register_attention(MHSA, q="to_queries", k="to_keys", num_heads=heads)
    refused(MHSA(), why)


@pytest.mark.parametrize(
    ("q", "k", "why"),
    [
        ("to_keys", "to_queries", "are read as queries, but act as keys"),
        ("to_queries", ("to_keys", "to_values"), "affect the output"),
        (("to_queries", "to_keys"), "to_keys", "act as keys"),
    ],
)
def test_swapped_or_wrong_projections_are_refused(q, k, why):
    oelm.register_attention(MHSA, q=q, k=k, num_heads=H)
    refused(MHSA(), why)


def test_a_registration_does_not_affect_other_classes_of_the_same_name():
    class BertSelfAttention(MHSA):
        pass

    oelm.register_attention(BertSelfAttention, ignore=True)
    assert len(qk_projections(build("bert"))) == 6
    with pytest.raises(UsageError, match="Pass the class itself"):
        oelm.register_attention("BertSelfAttention", ignore=True)
    with pytest.raises(UsageError, match=r"a subclass of nn\.Module"):
        oelm.register_attention(dict, ignore=True)


def test_a_user_class_named_like_one_of_transformers_is_read_by_itself():
    class GPT2Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.c_attn = H, nn.Linear(W, 3 * W)

        def forward(self, x):  # per head, unlike GPT-2's
            return Interleaved.forward(self, x)

        mix = property(lambda self: self.c_attn)

    read = qk_projections(GPT2Attention())
    assert {p.weight.layout.groups for p in read} == {H}


# -- modules that need example inputs, or compute scores in unusual ways ---------------------------------


class Demanding(MHSA):
    def forward(self, x, settings):
        return super().forward(x * settings["scale"])


class Demands(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Demanding()

    def forward(self, x):
        return self.inner(x, {"scale": 2.0})


def test_an_attention_that_cannot_be_called_needs_example_inputs():
    refused(Demands(), "example_inputs=")
    model = Demands().train()
    oelm.apply(model, "oelm-freeze", example_inputs=torch.randn(1, 5, W))
    assert model.inner.training


def test_the_audit_says_that_verification_was_skipped(tmp_path):
    model = Demands()
    oelm.apply(model, "oelm-freeze", verify=False)
    oelm.save(model, tmp_path)
    for unverified in (model, oelm.load(tmp_path, model=Demands())):
        assert not oelm.audit(unverified).verified
        assert "not verified" in str(oelm.audit(unverified))
    checked = MHSA()
    oelm.apply(checked, "oelm-freeze")
    assert oelm.audit(checked).verified


def test_an_attention_sink_may_rescale_the_output():
    class Sink(MHSA):
        def forward(self, x):
            q, k, v = (getattr(self, n)(x).unflatten(-1, (H, -1)).transpose(1, 2) for n in self.names)
            scores = q @ k.mT
            scale = torch.logsumexp(scores, -1, keepdim=True).sigmoid()
            return (scores.softmax(-1) @ v * scale).transpose(1, 2).flatten(2)

    assert oelm.apply(Sink(), "oelm-freeze").frozen > 0


def test_torchs_functional_attention_with_separate_weights_is_verified():
    """As in WavLM. A gate on the query's rows is found, so the function is really checked."""

    class Functional(MHSA):
        def __init__(self):
            super().__init__(names=("q_proj", "k_proj", "v_proj"))
            self.out_proj, self.gated = nn.Linear(W, W), False

        def forward(self, x):
            x = x.transpose(0, 1)
            parts = [getattr(self, n) for n in self.names]
            output, _ = F.multi_head_attention_forward(
                *(x, x, x, W, H, torch.empty(0), torch.cat([p.bias for p in parts]), None, None),
                *(False, 0.0, self.out_proj.weight, self.out_proj.bias),
                use_separate_proj_weight=True,
                **{f"{n}_weight": p.weight for n, p in zip(self.names, parts, strict=True)},
            )
            return (output * self.q_proj(x) if self.gated else output).transpose(0, 1)

    model = Functional()
    model.gated = True
    assert "affect the output" in verify_attention(model, qk_projections(model)).problem
    oelm.apply(Functional(), "oelm-freeze")


def test_masks_of_large_negative_numbers_do_not_hide_the_scores():
    class Masked(MHSA):
        def forward(self, x):
            q, k, v = (getattr(self, n)(x).unflatten(-1, (H, -1)).transpose(1, 2) for n in self.names)
            allowed = torch.ones(x.shape[1], x.shape[1]).tril()
            scores = 0.01 * (q @ k.mT) * allowed - 1e4 * (1 - allowed)
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    assert oelm.apply(Masked(), "oelm-freeze").frozen > 0


# -- more families ---------------------------------------------------------------------------------------


def latent_attention(kind="DeepseekV3", **rest):
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    config = getattr(hf, f"{kind}Config")(
        **{**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": H, "v_head_dim": 12, **sizes, **rest},
        first_k_dense_replace=1,
    )
    return getattr(hf, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(("kind", "rank"), [("DeepseekV3", 24), ("DeepseekV3", None), ("DeepseekV2", None)])
def test_multi_head_latent_attention(kind, rank):
    model, plain = (latent_attention(kind, q_lora_rank=rank) for _ in range(2))
    ids = torch.arange(3, 9)[None]
    oelm.apply(model, "oelm-freeze", seed=1)
    assert oelm.audit(model).ok
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5)
    own = {n.rpartition("self_attn.")[2] for n, p in model.named_parameters() if not p.requires_grad}
    queries = {"q_a_proj.weight", "q_b_proj.weight"} if rank else {"q_proj.weight"}
    assert own == {*queries, "kv_b_proj.k.weight", "kv_a_proj_with_mqa.k.weight"}
    heads = {p.name.rpartition("self_attn.")[2]: (p.num_heads, p.head_dim) for p in qk_projections(model)}
    assert heads["kv_b_proj.k"] == (H, 8)
    assert heads["kv_a_proj_with_mqa.k"] == (1, 4)


def test_the_layout_of_a_fused_vision_attention_is_detected():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention

    attention = VisionAttention(Qwen2VLVisionConfig(embed_dim=W, num_heads=H))
    projections = qk_projections(attention)
    assert [p.name for p in projections] == ["qkv.q", "qkv.k"]
    assert verify_attention(attention, projections).verified
    oelm.apply(attention, "oelm-freeze", seed=1)
    assert oelm.audit(attention).ok
