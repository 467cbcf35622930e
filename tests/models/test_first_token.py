"""A classifier whose last layer computes only the first token has unchanged logits and gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F

from oelm.methods.apply import apply
from oelm.models.first_token import compute_only_first_token
from oelm.training.measure.flops import flop_model

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IDS = torch.randint(2, 50, (4, 12), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(12) < torch.tensor([12, 9, 3, 7])[:, None]).long()


def classifier(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **SHAPE)
    return transformers.AutoModelForSequenceClassification.from_config(config).train()


def gradients(model, mask):
    loss = F.cross_entropy(model(input_ids=IDS, attention_mask=mask).logits, torch.tensor([0, 1, 2, 0]))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["full", "padded"])
def test_logits_and_gradients_do_not_change(kind, mask):
    plain = classifier(kind)
    patched = copy.deepcopy(plain)
    assert compute_only_first_token(patched)
    torch.testing.assert_close(
        patched(input_ids=IDS, attention_mask=mask).logits, plain(input_ids=IDS, attention_mask=mask).logits
    )
    theirs, ours = gradients(plain, mask), gradients(patched, mask)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name, atol=1e-6, rtol=1e-4)
    assert patched.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("method", ["oelm-freeze", "oelm-lowrank"])
def test_gradients_do_not_change_with_a_method_applied(method):
    plain = classifier("bert")
    patched = copy.deepcopy(plain)
    compute_only_first_token(patched)
    for model in (plain, patched):
        apply(model, method, seed=3)
    theirs, ours = gradients(plain, MASK), gradients(patched, MASK)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name, atol=1e-6, rtol=1e-4)


def test_a_deep_copy_uses_its_own_weights():
    patched = classifier("bert")
    compute_only_first_token(patched)
    other = copy.deepcopy(patched)
    with torch.no_grad():
        other.bert.encoder.layer[-1].output.dense.weight.zero_()
    assert not torch.equal(patched(input_ids=IDS).logits, other(input_ids=IDS).logits)


def test_unsupported_models_are_not_patched():
    config = transformers.AutoConfig.for_model("distilbert", vocab_size=50, dim=16, n_layers=1, n_heads=2)
    assert not compute_only_first_token(transformers.AutoModelForSequenceClassification.from_config(config))
    assert not compute_only_first_token(classifier("bert").bert)


def test_the_flop_model_does_not_count_skipped_work():
    plain = classifier("bert")
    patched = copy.deepcopy(plain)
    compute_only_first_token(patched)
    before, after = (flop_model(m).step(4, 12) for m in (plain, patched))
    d, ff, tokens, rows = 16, 32, 48, 4
    skipped = (2 * d * d + 2 * d * ff) * (tokens - rows)  # q, o and the MLP of one layer
    assert before.forward - after.forward == 2 * skipped
    assert before.attention - after.attention == 3 * 4 * rows * d * (12 * 12 - 12)
