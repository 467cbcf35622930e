import pytest
import torch

from oelm.errors import UsageError
from oelm.models.generate import generate, sample
from oelm.models.gpt import GPT, gpt_config


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model():
    return GPT(gpt_config("smoke", vocab_size=40, context=8), seeded())


def test_the_same_seed_gives_the_same_tokens_beyond_the_context(model):
    prompt = torch.tensor([1, 2, 3])
    a = generate(model, prompt, 20, generator=seeded(7))
    assert torch.equal(a, generate(model, prompt, 20, generator=seeded(7)))
    assert not torch.equal(a, generate(model, prompt, 20, generator=seeded(8)))
    assert len(a) == 23
    assert model.training


def test_temperature_zero_takes_the_most_likely_token(model):
    prompt = torch.tensor([5, 6])
    token = generate(model, prompt, 1, temperature=0)[-1]
    assert token == model.eval().logits(prompt[None])[0, -1].argmax()
    model.train()


def test_generation_ends_after_the_stop_token(model):
    first = generate(model, torch.tensor([1]), 1, temperature=0)[-1]
    assert len(generate(model, torch.tensor([1]), 9, temperature=0, stop_id=int(first))) == 2


def test_top_k_and_top_p_restrict_the_sampled_tokens():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    g = seeded()
    assert {int(sample(logits, top_k=2, generator=g)) for _ in range(200)} == {0, 1}
    assert {int(sample(logits, top_p=0.6, generator=g)) for _ in range(200)} == {0, 1}
    assert {int(sample(logits, top_p=0.5, generator=g)) for _ in range(200)} == {0}
    drawn = [int(sample(logits, generator=g)) for _ in range(4000)]
    assert abs(drawn.count(0) / 4000 - 0.5) < 0.04


def test_invalid_sampling_settings_are_errors(model):
    for bad in (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
    ):
        with pytest.raises(UsageError):
            sample(torch.zeros(4), **bad)
    with pytest.raises(UsageError, match="empty"):
        generate(model, torch.tensor([], dtype=torch.long), 1)
