"""`save_pretrained` after a method: plain transformers loads the same function, or the save is refused."""

import copy
import dataclasses
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_trainer_callback import trainer
from tiny_models import build, outputs

import oelm
from oelm.errors import OelmError
from oelm.methods.method import Method
from oelm.methods.presets import find_method

REGISTERED = [m for m in oelm.methods().values() if not m.relative_bias]  # that one needs our own GPT
EXTRAS = [
    dataclasses.replace(find_method("oelm-lowrank"), name="all-linear", core=True, temperature=True),
    dataclasses.replace(find_method("oelm-plus"), name="all", conv=3, core=True, temperature=True),
]


def trained(family, wish):
    """As after training: all that trains has moved, far enough for lost extras to show."""
    model = build(family)
    oelm.apply(model, wish, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def holds_convolution(wish):
    return bool(wish.conv or wish.conv_value)


def loaded_plainly(model, folder):
    plain, told = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return plain.eval()


@pytest.mark.parametrize(
    ("family", "wish"),
    [
        (family, wish)
        for family in ("bert", "gpt2", "llama")
        for wish in (*REGISTERED, *EXTRAS)
        if family != "bert" or not holds_convolution(wish)  # an encoder is not causal: apply refuses it
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_method_is_saved_as_a_plain_model_of_equal_logits_or_refused(family, wish, tmp_path):
    model = trained(family, wish)
    if holds_convolution(wish):
        with pytest.raises(OelmError, match=r"has no place for .*conv.*oelm\.save\(model, folder\)"):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
        return
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() <= build(family).state_dict().keys()
    assert torch.allclose(outputs(loaded_plainly(model, tmp_path)), outputs(model), atol=1e-4, rtol=1e-4)
    again = oelm.load(tmp_path).eval()
    for (name, p), (other, q) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p, q), name
    assert torch.equal(outputs(again), outputs(model))
    assert oelm.audit(again).ok


@pytest.mark.parametrize("name", ["oelm-lowrank", "oelm-plus"])
def test_what_oelm_save_writes_is_never_read_as_another_model_by_transformers(name, tmp_path):
    model = trained("llama", name)
    oelm.save(model, tmp_path)
    assert torch.equal(outputs(oelm.load(tmp_path)), outputs(model))
    assert torch.equal(outputs(oelm.load(tmp_path, model=build("llama"))), outputs(model))
    if name == "oelm-plus":
        with pytest.raises(OSError, match="safetensors"):
            type(model).from_pretrained(tmp_path)
    else:
        assert torch.allclose(outputs(loaded_plainly(model, tmp_path)), outputs(model), atol=1e-4)


def test_a_state_dict_of_the_users_own_must_fit_the_plain_architecture(tmp_path):
    model = trained("gpt2", "oelm-core")
    with pytest.raises(OelmError, match=r"state_dict holds .*core.*oelm\.folded_state"):
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
    oelm.save(model, tmp_path)
    model.save_pretrained(tmp_path, state_dict=oelm.folded_state(model))
    loaded_plainly(model, tmp_path)
    assert not list(tmp_path.glob("oelm*"))  # of the earlier save, which these weights need not fit


def test_a_part_of_a_model_is_folded_or_refused_as_well(tmp_path):
    model = trained("bert", "oelm-core")
    model.bert.save_pretrained(tmp_path / "part")
    assert not any("core" in key for key in load_file(tmp_path / "part" / "model.safetensors"))
    with pytest.raises(OelmError, match="has no place for"):
        trained("llama", "oelm-plus").model.save_pretrained(tmp_path / "refused")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_saves_itself_and_not_the_original(copied, tmp_path):
    model = trained("llama", "oelm-lowrank")
    other = copied(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other.save_pretrained(tmp_path)
    assert torch.allclose(outputs(loaded_plainly(other, tmp_path)), outputs(other), atol=1e-4)
    assert oelm.audit(other).ok
    assert (outputs(other) - outputs(model)).abs().max() > 1e-2


def test_a_cast_model_is_saved_without_a_record_that_would_not_fit(tmp_path):
    model = trained("llama", "oelm-freeze").double()
    with pytest.warns(UserWarning, match=r"no oelm\.json"):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / "oelm.json").exists()


# -- the Trainer -----------------------------------------------------------------------------------


def causal_trainer(model, folder, **changes):
    """The classification rows of the other tests, as a language model's."""

    def collate(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    run = trainer(model, folder, **changes)
    run.data_collator = collate
    return run


@pytest.mark.parametrize("name", ["oelm-lowrank", "oelm-plus"])
def test_the_trainers_folders_load_and_its_checkpoints_resume_bit_equal(name, tmp_path):
    def applied():
        model = build("llama")
        oelm.apply(model, name, seed=1)
        return model

    model = applied()
    run = causal_trainer(model, tmp_path / "whole", steps=4, save_steps=2)
    run.train()
    run.save_model(tmp_path / "final")
    for folder in (tmp_path / "final", tmp_path / "whole" / "checkpoint-4"):
        assert torch.equal(outputs(oelm.load(folder)), outputs(model.eval()))
    resumed = applied()
    causal_trainer(resumed, tmp_path / "again", steps=4, save_steps=2).train(
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2")
    )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    # transformers alone: the same function, or an error, but never another model.
    for folder in (tmp_path / "final", tmp_path / "whole" / "checkpoint-4"):
        if name == "oelm-lowrank":
            plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            assert torch.allclose(outputs(plain), outputs(model), atol=1e-4)
        else:
            with pytest.raises((OSError, RuntimeError)):
                transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_the_best_checkpoint_is_loaded_unfolded(tmp_path):
    model = build("llama")
    oelm.apply(model, Method("mine", freeze="all", temperature=True, core=True), seed=1)
    callback = oelm.OELMCallback()
    causal_trainer(
        model,
        tmp_path,
        callback=callback,
        steps=2,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first checkpoint
    ).train()
    assert callback.report.ok
    assert torch.equal(outputs(oelm.load(tmp_path / "checkpoint-1")), outputs(model.eval()))


def test_a_trainer_without_the_callback_is_refused_what_it_would_lose(tmp_path):
    model = build("llama")
    oelm.apply(model, "oelm-conv", seed=1)
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(OelmError, match=r"callbacks=\[oelm\.OELMCallback\(\)\]"):
        transformers.Trainer(model, arguments).save_model(tmp_path / "final")
