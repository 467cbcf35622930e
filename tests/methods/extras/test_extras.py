"""Trainable extras: initialised to the identity, computed correctly, trained, and counted."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import applied_model, build, optimizer_of, outputs

import oelm
from oelm.errors import OelmError
from oelm.methods.extras import extended
from oelm.methods.extras.kernels import causal_conv, lowrank_linear, rank_is_small
from oelm.methods.method import Method
from oelm.methods.presets import find_method

EVERYTHING = dataclasses.replace(
    find_method("oelm-plus"), name="everything", gain=1.0, conv=4, conv_value=4, core=True, temperature=True
)
ON_V = dataclasses.replace(find_method("oelm-lowrank"), name="conv-on-v", conv_value=4)
ROTARY = ("llama", "gpt-neox")  # elsewhere softmax cancels the bias on k, so its gradient is rounding noise


def reference_conv(x, taps):
    """Compute the same with torch's grouped convolution."""
    padded = F.pad(x.mT, (len(taps) - 1, 0))
    return F.conv1d(padded, taps.flip(0).T[:, None], groups=x.shape[2]).mT


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 6), st.integers(2, 5), st.integers(0, 99))
def test_the_convolution_equals_torchs_forward_and_backward(B, T, C, taps, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, C, generator=generator, dtype=torch.float64, requires_grad=True)
    w = torch.randn(taps, C, generator=generator, dtype=torch.float64, requires_grad=True)
    g = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    got, want = causal_conv(x, w), reference_conv(x, w)
    assert torch.allclose(got, want)
    for a, b in zip(torch.autograd.grad(got, (x, w), g), torch.autograd.grad(want, (x, w), g), strict=True):
        assert torch.allclose(a, b)


def test_the_convolution_passes_gradcheck_and_is_causal():
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(causal_conv, (x, w))
    changed = x.detach().clone()
    changed[:, 4:] += 1
    assert torch.equal(causal_conv(x, w)[:, :4], causal_conv(changed, w)[:, :4])


@pytest.mark.parametrize("family", ["own-gpt", "gpt2", "llama", "gpt-neox"])
def test_extras_are_the_identity_at_first_and_then_train(family):
    plain, model = build(family), build(family)
    oelm.apply(plain, "oelm-freeze", seed=1)
    applied = oelm.apply(model, EVERYTHING, seed=1)
    assert torch.allclose(outputs(model), outputs(plain), atol=1e-6)

    optimizer = optimizer_of(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):  # B is zero at first, so A changes from the second step on
        optimizer.zero_grad()
        outputs(model).square().mean().backward()
        optimizer.step()
    after = dict(model.named_parameters())
    extras = [n for n in after if n.rpartition(".")[2] in extended.EXTRAS]
    assert {n.rpartition(".")[2] for n in extras} == set(extended.EXTRAS)
    moves = [n for n in extras if family in ROTARY or not n.endswith(("k.extra_bias", "k_proj.extra_bias"))]
    assert all(not torch.equal(before[n], after[n]) for n in moves)
    assert all(torch.equal(before[n], p) for n, p in after.items() if not p.requires_grad)
    assert oelm.audit(model, optimizer).ok
    assert applied.qk_trainable == sum(after[n].numel() for n in extras)


def test_each_extra_computes_its_formula():
    model = build("own-gpt")
    x = torch.randn(2, 6, 32)
    plain = {p.role: p.heads() for p in oelm.qk_projections(model)[:2]}
    all_extras = Method(
        "kept", lowrank=2, lowrank_scale=4, bias=True, bias_scale=24, core=True, temperature=True, conv=3
    )
    oelm.apply(model, all_extras)
    q, k = model.blocks[0].attn.q, model.blocks[0].attn.k
    with torch.no_grad():
        for parameter in (*q.parameters(), *k.parameters()):
            if parameter is not q.weight and parameter is not k.weight:
                parameter.normal_()
    y = x @ plain["q"].reshape(32, 32).T + 4 * (x @ q.lowrank_a.T @ q.lowrank_b.T) + 24 * q.extra_bias
    y = torch.stack([y.view(2, 6, 4, 8)[:, :, h] @ q.core[h] * q.temperature[h] for h in range(4)], dim=2)
    assert torch.allclose(q(x), reference_conv(y.flatten(2), q.conv), atol=1e-3, rtol=1e-4)
    assert k.core is None  # q' C k has one C
    assert k.temperature is None


def with_taps(family, name, attention="sdpa"):
    """Return a decoder with random convolution taps."""
    model = build(family).eval()
    model.set_attn_implementation(attention)
    oelm.apply(model, name)
    with torch.no_grad():
        for n, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)))
            if n.endswith(".conv"):
                p.copy_(noise)
            elif p.dim() == 2 and p.requires_grad:
                p.add_(noise * 0.3)  # with the usual small init, attention hardly changes the output
    return copy.deepcopy(model)  # the hooks of a copy must act on the copy


TEXT = torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(0))
PADDED = torch.cat([torch.tensor([[7, 9, 8]]), TEXT], dim=1)
MASK = torch.tensor([[0] * 3 + [1] * 6])
REST = {"position_ids": (MASK.cumsum(1) - 1).clamp(min=0), "use_cache": False}


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", ["oelm-conv", ON_V], ids=lambda m: getattr(m, "name", m))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padding_does_not_change_the_output(family, name, attention, monkeypatch):
    model = with_taps(family, name, attention)
    want = model(TEXT, use_cache=False).logits
    found = model(PADDED, attention_mask=MASK, **REST).logits[:, 3:]
    assert torch.allclose(found, want, atol=1e-4)
    assert all(m.real_tokens is None for m in model.modules() if hasattr(m, "conv"))  # cleared
    monkeypatch.setattr(extended, "real_tokens", lambda _mask: None)
    leaked = model(PADDED, attention_mask=MASK, **REST).logits[:, 3:]
    assert (leaked - want).abs().max() > 1e-2  # without the mask, padding changes the output


def test_padding_is_masked_under_gradient_checkpointing():
    grads = []
    for again in (False, True):
        model = with_taps("llama", "oelm-conv").train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        first = model(PADDED, attention_mask=MASK, **REST).logits[:, 3:].square().mean()
        # a forward pass with another mask, before the backward pass
        second = model(PADDED, use_cache=False).logits.square().mean()
        (first + second).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if n.endswith(".conv")})
    assert grads[0]
    assert all(torch.allclose(g, grads[1][n], rtol=1e-3, atol=1e-5) for n, g in grads[0].items())


def test_real_tokens_are_read_from_every_kind_of_mask():
    real = torch.tensor([[False, True, True]])
    seen = real[:, None, None, :] & torch.ones(3, 3, dtype=torch.bool).tril()
    added = torch.zeros(1, 1, 3, 3).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (real, real.int() * 5, seen, added, added.bfloat16()):
        assert extended.real_tokens(mask).tolist() == real.tolist()
    for mask in (None, "a mask of another library", torch.ones(1, 1, 1, 3)):
        assert extended.real_tokens(mask) is None


def test_a_mask_passed_by_position_is_found():
    attention = with_taps("llama", "oelm-conv").model.layers[0].self_attn
    extended._set_mask(attention, (torch.zeros(1, 9, 32), None, MASK), {})
    assert attention.q_proj.real_tokens.tolist() == MASK.bool().tolist()


def test_sequences_packed_into_one_row_are_refused_with_a_convolution():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(OelmError, match="packs several sequences"):
        with_taps("llama", "oelm-conv")(TEXT, position_ids=positions, use_cache=False)


def test_a_temperature_on_normalised_queries_is_refused():
    model = build("qwen3")
    with pytest.raises(OelmError, match=r"normalises the queries of each head \(q_norm\), so"):
        oelm.apply(model, "oelm-temperature")
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.Identity()
    oelm.apply(model, "oelm-temperature")


@pytest.mark.parametrize("family", ["own-gpt", "gpt2", "llama"])
def test_a_convolution_on_v_is_the_identity_at_first_and_trains(family):
    model = build(family)
    before = outputs(model).detach()
    applied = oelm.apply(model, Method("v alone", conv_value=3))
    assert torch.equal(outputs(model), before)
    extended = [
        m for name, m in model.named_modules() if name.endswith((".v", ".v_proj")) and hasattr(m, "conv")
    ]
    assert len(extended) == len(oelm.qk_projections(model)) // 2
    outputs(model).square().mean().backward()
    for v in extended:
        assert v.conv.grad.abs().sum() > 0
        assert v.weight.grad.abs().sum() > 0
        assert v.lowrank_a is None
    assert applied.frozen == 0
    x = torch.randn(2, 6, extended[0].in_features)
    with torch.no_grad():
        values = extended[0](x)
        extended[0].conv.normal_()
        assert torch.allclose(extended[0](x), reference_conv(values, extended[0].conv), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "trained"),  # in 4 layers of width 128
    [
        ("oelm-bias", 4 * 2 * 128),
        ("oelm-conv", 4 * 2 * 4 * 128),
        ("oelm-lowrank", 4 * 2 * 8 * (128 + 128)),
        ("oelm-plus", 4 * 2 * 128 + 2 * (20 + 3 * 2) * (128 + 128)),
        ("oelm-core", 4 * 8 * 16 * 16),
        ("oelm-temperature", 4 * 8),
        ("oelm-relative", 4 * 8 * 129),
    ],
)
def test_the_number_of_trainable_parameters_of_each_extra(name, trained):
    from oelm.models.gpt import GPT, gpt_config

    model = GPT(gpt_config("mini", vocab_size=64, context=32))
    applied = oelm.apply(model, name)
    assert applied.qk_trainable == trained
    assert applied.qk_total == 4 * 2 * 128 * 128 + trained
    control = oelm.apply(GPT(gpt_config("mini", vocab_size=64, context=32)), applied.method.control)
    adapters = sum(p.numel() for n, p in model.named_parameters() if "lowrank" in n)  # not in the control
    assert control.total == applied.total - adapters
    assert control.frozen == 0


@pytest.mark.parametrize(("size", "most"), [("mini", 0.10), ("medium-512", 0.05)])
def test_the_recommended_methods_train_few_of_the_qk_parameters(size, most):
    from oelm.models.gpt import GPT, gpt_config

    for name, limit in (("oelm-plus", most), ("oelm-bias", 0.01)):
        applied = oelm.apply(GPT(gpt_config(size, vocab_size=8, context=8, position="rope")), name)
        assert 0 < applied.qk_trainable / applied.qk_total < limit


def test_ranks_by_layer_fit_models_of_other_depth():
    def ranks(family, lowrank):
        model = build(family)
        oelm.apply(model, Method("mine", lowrank=lowrank))
        modules = [m for n, m in model.named_modules() if n.endswith((".q", ".q_proj", ".query"))]
        return [0 if m.lowrank_a is None else len(m.lowrank_a) for m in modules]

    assert ranks("own-gpt", (5, 1)) == [5, 1]
    assert ranks("bert", (5, 1)) == [5, 1, 1]  # the last rank holds for all further layers
    assert ranks("llama", [0, 3]) == [0, 3, 3]
    assert ranks("bart", (5, 1)) == [5, 1, 5, 5, 1, 1]  # the decoder counts anew; its layers have two
    assert ranks("albert", (5, 1)) == [5]
    with pytest.raises(OelmError, match=r"ranks for 3 layers, .*\[5, 1, 2\].*has only 2.*\(20, 2\)"):
        ranks("own-gpt", (5, 1, 2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt-neox", "bert"])  # the last three have own biases
def test_a_bias_is_added_before_the_rotation_and_to_the_projections_own(family):
    model = build(family)
    method = Method("mine", init="headwise", freeze="all", bias=True, bias_scale=24)
    applied = oelm.apply(model, method)
    pairs = [m for m in model.modules() if isinstance(m, extended.ExtendedProjection)]
    assert applied.qk_trainable == sum(m.out_features for m in pairs)
    assert all(m.bias is None or not m.bias.requires_grad for m in pairs)
    assert (pairs[0].bias is None) == (family == "llama")
    before = outputs(model)
    with torch.no_grad():
        for m in pairs:
            m.extra_bias.normal_(std=0.1)
            x = torch.randn(2, 3, m.in_features)
            own = 0.0 if m.bias is None else m.bias
            assert torch.allclose(m(x), x @ m.weight.T + own + 24 * m.extra_bias, atol=1e-5)
    assert not torch.allclose(outputs(model), before, atol=1e-5, rtol=0)
    assert oelm.audit(model, optimizer_of(model)).ok


def test_with_rotary_positions_biases_alone_make_attention_depend_on_the_distance():
    """With q and k constant, the score of two tokens depends on their distance and on nothing else."""
    from oelm.models.gpt import GPT, gpt_config, rotate

    model = GPT(gpt_config("smoke", vocab_size=64, context=16, position="rope"))
    oelm.apply(model, "oelm-bias")
    attention = model.blocks[0].attn
    with torch.no_grad():
        attention.q.extra_bias.normal_(generator=torch.Generator().manual_seed(0))
        attention.k.extra_bias.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.zeros(1, 16, 32)
    q, k = (rotate(p(x).view(1, 16, 4, 8), model.rotation)[0, :, 0] for p in (attention.q, attention.k))
    scores = q @ k.T  # (16, 16)
    assert scores[:, 0].std() > 1
    assert torch.allclose(scores[1:, 1:], scores[:-1, :-1], rtol=1e-3, atol=1e-2)


def test_relative_bias_trains_in_our_gpt():
    model = applied_model("own-gpt", "oelm-relative")
    outputs(model).square().mean().backward()
    assert model.blocks[0].attn.relative_bias.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt-neox"])
def test_a_convolution_generates_only_without_a_cache(family):
    model = applied_model(family, "oelm-conv")
    ids = torch.tensor([[5, 6, 7]])
    assert (
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=63).shape[1] > 3
    )
    with pytest.raises(OelmError, match="use_cache=False"):
        model.generate(
            ids, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=63
        )


def test_packed_sequences_are_refused_by_the_convolution():
    with pytest.raises(OelmError, match="packs sequences"):
        causal_conv(torch.randn(7, 4), torch.randn(3, 4))


def test_extras_work_under_gradient_checkpointing():
    model = applied_model("llama", "oelm-plus").train()
    model.gradient_checkpointing_enable()
    outputs(model).square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_disable()
    outputs(model).square().mean().backward()
    assert all(torch.allclose(p.grad, grads[n], atol=1e-6) for n, p in model.named_parameters() if n in grads)


def test_a_missing_or_parametrized_value_projection_is_refused():
    on_v = Method("v", conv_value=3)
    model = build("llama")
    attention = next(p.attention for p in oelm.qk_projections(model))
    torch.nn.utils.parametrizations.weight_norm(attention.v_proj)
    with pytest.raises(OelmError, match="conv_value=0"):
        oelm.apply(model, on_v)
    model = build("own-gpt")
    attn = model.blocks[0].attn
    attn.mixed, attn.v = attn.v, None
    with pytest.raises(OelmError, match="does not have exactly one projection with a known name"):
        oelm.apply(model, on_v)
    assert type(attn.q) is torch.nn.Linear


@pytest.mark.parametrize("rank", [4, 5])  # a small rank, and one that is not small
@pytest.mark.parametrize("tokens", [5, 40])  # few tokens take another code path
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_lowrank_linear_equals_two_products_forward_and_backward(trained, transposed, tokens, rank):
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def two_products(x, w, bias, a, b, scale):
        return F.linear(x, w, bias) + F.linear(F.linear(x, a), b) * scale

    x, w, bias, a, b = (
        draw(1, tokens, 70),
        draw(*((70, 64) if transposed else (64, 70))),
        draw(64),
        draw(rank, 70),
        draw(64, rank),
    )
    outcomes = []
    for linear in (lowrank_linear, two_products):
        inputs = [t.clone().requires_grad_() for t in (x, w, bias, a, b)]
        inputs[1].requires_grad_(trained)
        y = linear(inputs[0], inputs[1].t() if transposed else inputs[1], *inputs[2:], 4.0)
        y.square().sum().backward()
        outcomes.append([y, *(t.grad for t in inputs if t.requires_grad)])
    assert len(outcomes[0]) == 5 + trained
    for ours, plain in zip(*outcomes, strict=True):
        assert torch.allclose(ours, plain)


@pytest.mark.bf16
@pytest.mark.parametrize("width", [8, 64])
def test_lowrank_linear_under_autocast_has_fp32_gradients(width):
    x, w = torch.randn(2, 40, width), torch.randn(width, width) / width**0.5
    a = (torch.randn(2, width) / width**0.5).requires_grad_()
    b = torch.randn(width, 2, requires_grad=True)
    assert rank_is_small(a, b) == (width == 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = lowrank_linear(x, w, None, a, b, 1.0)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), x @ (w + b @ a).mT, atol=0.3, rtol=0.05)
    y.float().sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_lowrank_linear_saves_no_merged_matrix_for_the_backward_pass():
    w, x = torch.randn(64, 64), torch.randn(3, 20, 64, requires_grad=True)
    a, b, kept = torch.randn(2, 64, requires_grad=True), torch.randn(64, 2, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        lowrank_linear(x, w, None, a, b, 1.0)
    assert set(kept) == {t.data_ptr() for t in (x, w, a, b)}


def test_a_convolution_in_a_bidirectional_network_is_refused():
    from oelm.models.gpt import GPT, gpt_config

    with pytest.raises(OelmError, match="not a causal"):
        oelm.apply(GPT(gpt_config("smoke", vocab_size=64, context=8, causal=False, classes=2)), ON_V)


def test_second_derivatives_of_low_rank_adapters_and_convolutions_are_an_error():
    x, taps = torch.randn(2, 40, 32, requires_grad=True), torch.randn(4, 32, requires_grad=True)
    weight, a, b = torch.randn(32, 32), torch.randn(2, 32, requires_grad=True), torch.randn(32, 2)
    for y in (causal_conv(x, taps), lowrank_linear(x, weight, None, a, b, 1.0)):
        with pytest.raises(OelmError, match="second derivatives"):
            torch.autograd.grad(y.square().sum(), x, create_graph=True)
