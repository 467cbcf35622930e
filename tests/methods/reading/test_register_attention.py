"""Attention classes that oelm recognises by itself, after `oelm.register_attention()`, or not at all."""

import pytest
import torch
from tiny_models import Odd, OddAttention, build
from torch import nn

import oelm
from oelm.errors import OelmError, UsageError


def test_the_error_about_an_unknown_attention_shows_how_to_register_it():
    with pytest.raises(OelmError) as error:
        oelm.apply(nn.ModuleList([OddAttention()]), "oelm-freeze")
    assert "0.alpha: Linear" in str(error.value)
    assert "import oelm" in str(error.value)
    assert f'oelm.register_attention("{OddAttention.__module__}.OddAttention"' in str(error.value)


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


@pytest.mark.parametrize("size", [2.0, 0, True])
def test_registering_a_size_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(UsageError, match="num_heads must be the name of an attribute or a positive integer"):
        oelm.register_attention(Odd, q="alpha", k="beta", num_heads=size)


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
