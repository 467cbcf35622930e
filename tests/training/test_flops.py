"""FLOPs of a step, by hand and against torch's FLOP counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oelm.methods.apply import apply
from oelm.methods.presets import find_method
from oelm.models.gpt import GPT, gpt_config
from oelm.training.measure.flops import flop_model


def medium(**changes) -> GPT:
    return GPT(gpt_config("medium-512", **changes))


def step_flops(name: str) -> float:
    """Return the FLOPs of a row of 8 tokens in medium-512 with the named method."""
    model = medium(vocab_size=64)
    apply(model, name)
    return flop_model(model).step(1, 8).total


@pytest.fixture(scope="module")
def frozen_flops() -> float:
    return step_flops("oelm-freeze")


def test_flops_of_medium_512_by_hand():
    model = medium()
    cost = flop_model(model).step(rows=4, length=512)
    tokens, d, ff, layers, vocabulary = 4 * 512, 512, 2048, 6, 50257
    weights = layers * (4 * d * d + 2 * d * ff) + vocabulary * d
    assert cost.forward == 2 * tokens * weights
    assert cost.input_gradient == cost.weight_gradient == cost.forward
    assert cost.attention == 3 * layers * (4 * 4 * 512 * 512 * d) / 2
    apply(model, "oelm-freeze")
    frozen = flop_model(model)
    assert cost.total - frozen.step(4, 512).total == 2 * tokens * layers * 2 * d * d
    assert frozen.all_trained().step(4, 512).total == cost.total


def test_frozen_qk_save_at_most_four_of_seventy_two():
    """Without attention and head, a block's matmuls are 72 d^2 per token and Q/K's weight gradients 4 d^2."""
    model = medium(vocab_size=64)
    apply(model, "oelm-freeze")
    cost = flop_model(model)
    assert cost.saving(1, 1) == pytest.approx(4 / 72, rel=0.01)
    assert cost.saving(16, 512) < 4 / 72


@pytest.mark.parametrize("method", ["baseline", "oelm-relative"])
def test_flops_of_a_classifier_agree_with_torchs_counter(method):
    from torch.utils.flop_counter import FlopCounterMode

    model = GPT(gpt_config("mini", vocab_size=64, classes=3))
    apply(model, method)
    assert model.computes_only_last_token == (method == "baseline")
    cost = flop_model(model).step(rows=2, length=16)
    with FlopCounterMode(display=False) as counter:
        model.classify(torch.arange(32).view(2, 16), torch.tensor([16, 9]))
    counted = counter.get_flop_counts()["Global"]
    assert cost.forward == sum(flops for name, flops in counted.items() if "bmm" not in str(name))


def test_a_low_rank_adapter_costs_its_gradients(frozen_flops):
    rank = find_method("oelm-lowrank").lowrank
    gradients = 2 * 2 * 8 * (2 * rank * 512)  # two products with each factor, for 8 tokens
    assert step_flops("oelm-lowrank") - frozen_flops == 6 * 2 * gradients


def test_a_low_rank_adapter_of_high_rank_costs_the_full_weight_gradient():
    mini = [GPT(gpt_config("mini", vocab_size=64)) for _ in range(2)]
    apply(mini[0], "baseline")
    apply(mini[1], replace(find_method("oelm-lowrank"), lowrank=9))
    assert flop_model(mini[0]).step(2, 8) == flop_model(mini[1]).step(2, 8)
    assert flop_model(mini[1]).saving(2, 8) == 0


def test_ranks_by_layer_cost_what_each_rank_costs(frozen_flops):
    per_rank = 2 * 2 * 8 * 2 * (2 * 512)  # two products with each factor of q and k, for 8 tokens
    assert step_flops("oelm-plus") - frozen_flops == (20 + 5 * 2) * per_rank  # 20 in the first layer


@pytest.mark.parametrize(
    ("name", "per_token"),  # multiply-adds of one token in the extra matrices of one layer
    [
        ("oelm-conv", 2 * 4 * 512),
        ("oelm-core", 512 * 64),  # one square matrix per head of q
        ("oelm-temperature", 0),
        ("oelm-bias", 0),
        ("oelm-relative", 0),
    ],
)
def test_every_extra_costs_three_times_its_forward_products(frozen_flops, name, per_token):
    assert step_flops(name) - frozen_flops == 3 * 2 * 8 * 6 * per_token


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GPT2", {}),
        ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        ("Gemma2", {"num_key_value_heads": 2, "head_dim": 32}),
        ("Bloom", {}),
    ],
)
def test_flops_of_decoders_agree_with_torchs_counter(kind, changes):
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**shape, attn_implementation="eager", **changes)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    ids = torch.arange(3 * 16).view(3, 16)
    cost = flop_model(model).step(rows=3, length=16)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    masked = cost.attention / 3  # forward, of which eager attention also computes the masked half
    assert counter.get_total_flops() == cost.forward + 2 * masked
