"""Our GPT: parameter counts, causality, padding, saving and loading, invalid configs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.errors import OelmError, UsageError
from oelm.models.gpt import GPT, GPTConfig, gpt_config
from oelm.models.sizes import SIZES


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small(**rest):
    return GPT(gpt_config("smoke", **{"vocab_size": 61, "context": 24, **rest}), seeded()).eval()


def count(config):
    with torch.device("meta"):
        model = GPT(config)
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts_of_the_original_study():
    assert count(gpt_config("medium-512")) == 44_896_768
    assert count(gpt_config("medium-512", classes=2, causal=False)) == 44_897_794
    with torch.device("meta"):
        model = GPT(gpt_config("medium-512"))
    assert sum(b.attn.q.weight.numel() + b.attn.k.weight.numel() for b in model.blocks) == 3_145_728


@pytest.mark.parametrize("size", [size for size in SIZES if size != "medium-512"])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_every_size_trains_one_step(size, position):
    model = GPT(gpt_config(size, vocab_size=50, context=16, position=position), seeded())
    ids = torch.randint(50, (2, 17), generator=seeded(1))
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_logits_do_not_depend_on_later_tokens(position):
    model = small(position=position)
    ids = torch.randint(61, (1, 12), generator=seeded(2))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 61
    a, b = model.logits(ids), model.logits(changed)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    extra=st.integers(0, 4),
    causal=st.booleans(),
    relative=st.booleans(),
)
def test_class_logits_do_not_depend_on_padding_or_on_the_batch(lengths, extra, causal, relative):
    model = small(classes=3, causal=causal)
    if relative:
        for block in model.blocks:
            block.attn.add_relative_bias(6)
            torch.nn.init.normal_(block.attn.relative_bias, generator=seeded(5))
    rows = [torch.randint(61, (n,), generator=seeded(n)) for n in lengths]
    ids = torch.randint(61, (len(rows), max(lengths) + extra), generator=seeded(9))  # random padding
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    together = model.classify(ids, torch.tensor(lengths))
    for i, row in enumerate(rows):
        alone = model.classify(row[None], torch.tensor([len(row)]))[0]
        assert torch.allclose(together[i], alone, atol=1e-5)


@pytest.mark.parametrize("relative_bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_a_classifier_reads_the_last_hidden_state_of_the_whole_trunk(position, causal, relative_bias):
    draw = torch.Generator().manual_seed(0)
    shape = {"vocab_size": 11, "context": 8, "width": 16, "layers": 2, "heads": 2, "ff": 32, "classes": 3}
    model = GPT(GPTConfig(**shape, position=position, causal=causal), draw)
    if relative_bias:
        for block in model.blocks:
            block.attn.add_relative_bias(3)
            block.attn.relative_bias.data.normal_(generator=draw)
    ids, lengths = torch.randint(0, 11, (3, 8), generator=draw), torch.tensor([8, 5, 1])
    outputs = model.classify(ids, lengths), model.head(model(ids, lengths)[torch.arange(3), lengths - 1])
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in outputs]
    torch.testing.assert_close(*gradients)


def test_rotary_attention_scores_depend_only_on_the_distance():
    from oelm.models.gpt import rotary_table, rotate

    table = rotary_table(GPTConfig(vocab_size=5, context=32, width=16, heads=2))
    q, k = torch.randn(2, 1, 1, 2, 8, generator=seeded())

    def score(i, j):
        return (rotate(q, table[i : i + 1]) * rotate(k, table[j : j + 1])).sum()

    assert torch.allclose(score(9, 4), score(25, 20), atol=1e-5)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-3)


def test_rotary_positions_are_products_with_complex_numbers():
    from oelm.models.gpt import rotary_table, rotate

    config = GPTConfig(vocab_size=5, context=9, width=24, heads=3, position="rope")
    x, g = torch.randn(2, 2, 7, 3, 8, generator=seeded())
    x.requires_grad_()
    angle = torch.arange(7)[:, None, None] * 10_000.0 ** (-torch.arange(4) / 4)  # (T, 1, hs / 2)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], -1)
    ours = rotate(x, rotary_table(config)[:7])
    assert torch.allclose(ours, expected, atol=1e-5)
    (wanted,), (found,) = (torch.autograd.grad(y, x, g) for y in (expected, ours))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_new_relative_bias_changes_nothing_and_gets_gradients():
    model = small()
    ids = torch.randint(61, (2, 20), generator=seeded(3))
    before = model.logits(ids)
    for block in model.blocks:
        block.attn.add_relative_bias(8)
    assert torch.allclose(model.logits(ids), before, atol=1e-5)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert model.blocks[0].attn.relative_bias.grad.abs().sum() > 0


def test_a_loaded_model_has_the_same_config_and_weights(tmp_path):
    model = small(position="rope")
    model.save(tmp_path)
    again = GPT.load(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_loading_a_folder_that_is_not_a_saved_gpt_is_an_error(tmp_path):
    with pytest.raises(OelmError, match=r"no config\.json"):
        GPT.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(OelmError, match="oelm-gpt"):
        GPT.load(tmp_path)
    for name, content in (("model.safetensors", b"nonsense"), ("config.json", b"{"), ("config.json", b"[]")):
        GPT(gpt_config("smoke", vocab_size=9)).save(tmp_path / "damaged")
        (tmp_path / "damaged" / name).write_bytes(content)
        with pytest.raises(OelmError, match=name):
            GPT.load(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 7}, "not divisible"),
        ({"layers": 0}, "at least 1"),
        ({"dropout": 1.0}, "dropout"),
        ({"position": "alibi"}, "position"),
        ({"causal": False}, "causal"),
        ({"width": 24, "heads": 8, "position": "rope"}, "even head size"),
        ({"classes": -1}, "classes"),
    ],
)
def test_invalid_configs_are_errors(fields, message):
    with pytest.raises(UsageError, match=message):
        GPTConfig(**fields)


def test_wrong_use_is_an_error():
    with pytest.raises(UsageError, match="medium-512"):
        gpt_config("medium_512")
    with pytest.raises(UsageError, match="context"):
        small().logits(torch.zeros(1, 25, dtype=torch.long))
    with pytest.raises(UsageError, match="not a classifier"):
        small().classify(torch.zeros(1, 2, dtype=torch.long), torch.tensor([2]))
    with pytest.raises(UsageError, match="not a language model"):
        small(classes=2).logits(torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("loss", [GPT.loss, GPT.token_losses])
def test_targets_of_another_shape_are_an_error(loss):
    ids = torch.zeros(3, 20, dtype=torch.long)
    with pytest.raises(UsageError, match=r"the targets have the shape \(3, 19\), but the ids \(3, 20\)"):
        loss(small(), ids, ids[:, 1:])
